"""A study's statistics, compared with loops, scipy, closed forms, and simulated studies."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import t

from evaluation.study.schedule import assign_raters
from evaluation.study.statistics.power import (
    PowerConfig,
    VoteModel,
    compute_power,
    format_power,
    power_table,
    variance_components,
)
from evaluation.study.statistics.preference import Preference, preference
from evaluation.study.statistics.strengths import PRIOR, bradley_terry, shares, strengths
from shards.base.errors import RequestError

seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Design:
    """The prompt and the rater of each of N votes: (N,) indices each."""

    prompts: np.ndarray
    raters: np.ndarray

    @classmethod
    def make(cls, num_prompts: int, num_raters: int, votes: int, seed: int = 0) -> "Design":
        """Assign raters to prompts as a study's schedule does."""
        assigned = assign_raters(np.random.default_rng(seed).random((num_prompts, num_raters)), votes)
        return cls(np.repeat(np.arange(num_prompts), votes), assigned.ravel())


def simulate(model: VoteModel, design: Design, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return (count, N) scores of `count` studies, each with its own prompts and raters."""
    a = rng.normal(scale=model.prompt_sd, size=(count, design.prompts.max() + 1))
    b = rng.normal(scale=model.rater_sd, size=(count, design.raters.max() + 1))
    d = model.mean + a[:, design.prompts] + b[:, design.raters]
    d += rng.logistic(size=d.shape)
    return np.where(np.abs(d) < model.threshold, 0.5, (d > 0).astype(float))


def share_of(test: Callable[[Preference], bool], model: VoteModel, design: Design, draws: int, seed: int) -> float:
    """Return the share of simulated studies whose preference passes `test`."""
    studies = simulate(model, design, draws, np.random.default_rng(seed))
    return sum(test(preference(scores, design.prompts, design.raters)) for scores in studies) / draws


def random_votes(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return scores, prompts and raters of an unbalanced study with arbitrary ids. Some vote twice on a prompt."""
    rng = np.random.default_rng(seed)
    prompts, raters = rng.integers(0, 9, 60), rng.integers(0, 5, 60)
    return rng.choice([0.0, 0.5, 1.0], 60), np.array([f"p{i}" for i in prompts]), raters * 7 + 3


# --- the preference ---


@settings(max_examples=20)
@given(seeds)
def test_the_variance_equals_a_sum_over_pairs_of_votes(seed: int) -> None:
    """Sum e·e' over pairs that share a prompt or a rater, minus the mean over pairs that share neither, in a loop."""
    scores, prompts, raters = random_votes(seed)
    e = scores - scores.mean()
    related: list[float] = []
    apart: list[float] = []
    same_cell: list[float] = []
    for i, j in product(range(len(scores)), repeat=2):
        is_prompt, is_rater = prompts[i] == prompts[j], raters[i] == raters[j]
        (related if is_prompt or is_rater else apart).append(e[i] * e[j])
        if is_prompt and is_rater:
            same_cell.append(e[i] * e[j])
    count = len(scores)
    base = np.mean(apart)
    expected = (sum(related) - len(related) * base) / count**2
    least = (sum(same_cell) - len(same_cell) * base) / count**2
    assert preference(scores, prompts, raters).variance == pytest.approx(max(expected, least), rel=1e-9)


@settings(max_examples=20)
@given(seeds)
def test_properties_of_a_preference(seed: int) -> None:
    scores, prompts, raters = random_votes(seed)
    found = preference(scores, prompts, raters)
    low, high = found.interval()
    assert 0 <= low < found.value < high <= 1
    other = preference(1 - scores, prompts, raters)
    assert other.interval() == pytest.approx((1 - high, 1 - low))
    order = np.random.default_rng(seed).permutation(len(scores))
    again = preference(scores[order], prompts[order], raters[order])
    assert again.interval() == pytest.approx((low, high))
    narrow = found.interval(0.9)
    assert low < narrow[0] and narrow[1] < high


def test_independent_votes_have_wilsons_interval() -> None:
    """Every vote has its own prompt and rater."""
    scores = np.repeat([1.0, 0.0], [70, 30])
    found = preference(scores, np.arange(100), np.arange(100))
    variance = 0.7 * 0.3 / 99
    assert found.variance == pytest.approx(variance)
    assert found.degrees == pytest.approx(99)
    q2 = t.ppf(0.975, 99) ** 2 * variance / 0.21
    middle = (0.7 + q2 / 2) / (1 + q2)
    assert sum(found.interval()) / 2 == pytest.approx(middle)


@pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
def test_unanimous_votes_count_as_the_smaller_number_of_clusters(score: float) -> None:
    prompts, raters = (part.ravel() for part in np.indices((20, 4)))
    found = preference(np.full(80, score), prompts, raters)
    low, high = found.interval()
    q2 = t.ppf(0.975, 3) ** 2 / 4
    assert high - low == pytest.approx(q2 / (1 + q2) if score != 0.5 else np.sqrt(q2 * (1 + q2)) / (1 + q2))
    assert not found.is_within(0.2)


@pytest.mark.parametrize("which", [0, 1])
def test_one_rater_or_prompt_gives_the_widest_interval(which: int) -> None:
    ids = [np.zeros(10), np.arange(10)]
    found = preference(np.repeat([1.0, 0.0], 5), ids[which], ids[1 - which])
    assert found.interval() == pytest.approx((0, 1))


@pytest.mark.parametrize(
    ("model", "least", "most"),
    [
        (VoteModel(0.5, 0.2, 0.5, 0.2), 0.93, 0.975),
        (VoteModel(1.0, 0.4), 0.93, 0.97),
        (VoteModel(1.5, 1.0, 1.5, 0.2), 0.93, 0.97),
    ],
)
def test_coverage_in_simulated_studies(model: VoteModel, least: float, most: float) -> None:
    """1,500 studies each; docs/evidence/intervals.md has results of 10,000. Wilson's interval would be too narrow."""
    design = Design.make(200, 15, 5)
    truth = model.preference

    def holds(found: Preference) -> bool:
        low, high = found.interval()
        return low <= truth <= high

    assert least < share_of(holds, model, design, 1500, seed=5) < most


# --- simulation ---


@pytest.mark.parametrize("ties", [0.0, 0.3])
def test_the_true_preference_is_the_mean_of_many_votes(ties: float) -> None:
    model = VoteModel(1.0, 0.4, 0.5, ties)
    one_each = Design(np.arange(1000), np.arange(1000))
    scores = simulate(model, one_each, 400, np.random.default_rng(0))
    assert scores.mean() == pytest.approx(model.preference, abs=4 * 0.5 / np.sqrt(scores.size))
    equal = simulate(VoteModel(1.0, 0.4, 0.0, ties), one_each, 400, np.random.default_rng(1))
    assert (equal == 0.5).mean() == pytest.approx(ties, abs=0.005)
    assert model.with_preference(0.7).preference == pytest.approx(0.7)


def test_variance_components_match_simulated_votes() -> None:
    """Compare with the covariances of votes on the same prompt, by the same rater, and of a vote with itself."""
    model = VoteModel(1.2, 0.7, 0.4, 0.2)
    rng = np.random.default_rng(0)
    two = Design(np.array([0, 0, 1]), np.array([0, 1, 0]))
    votes = simulate(model, two, 400_000, rng)
    covariance = np.cov(votes, rowvar=False)
    found = variance_components(model)
    assert found[0] == pytest.approx(covariance[0, 1], abs=0.001)
    assert found[1] == pytest.approx(covariance[0, 2], abs=0.001)
    assert sum(found) == pytest.approx(covariance[0, 0], abs=0.001)


@pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
def test_unanimous_votes_that_are_almost_all_by_one_rater(score: float) -> None:
    """The degrees of freedom are at least 1, as documented."""
    found = preference(np.full(401, score), np.arange(401), np.append(np.zeros(400), 1))
    low, high = found.interval()
    assert found.degrees == 1 and 0 <= low <= score <= high <= 1 and high - low > 0.9


# --- power ---


@pytest.mark.parametrize(("raters", "prompts"), [(15, 200), (30, 400)])
def test_power_matches_simulated_studies(raters: int, prompts: int) -> None:
    model, margin = VoteModel(0.5, 0.2, ties=0.2), 0.06
    design = Design.make(prompts, raters, 5)
    found = compute_power(model, raters, prompts, 5, margin)

    def is_seen(found: Preference) -> bool:
        low, high = found.interval()
        return low > 0.5 or high < 0.5

    def is_equal(found: Preference) -> bool:
        return found.is_within(margin)

    assert share_of(is_seen, model.with_preference(0.5 + margin), design, 600, 1) == pytest.approx(
        found.difference, abs=0.06
    )
    assert share_of(is_equal, model.with_preference(0.5), design, 600, 2) == pytest.approx(found.equivalence, abs=0.06)
    assert share_of(is_equal, model.with_preference(0.5 + margin), design, 600, 3) < 0.08  # 5 % at most, and its error


def test_more_raters_and_prompts_have_more_power() -> None:
    config = PowerConfig(raters=[5, 15, 45], prompts=[50, 200])
    rows = power_table(config, 5, 0.08)
    assert [(row.raters, row.prompts) for row in rows] == [(5, 50), (5, 200), (15, 50), (15, 200), (45, 50), (45, 200)]
    by = {(row.raters, row.prompts): row for row in rows}
    for raters, prompts in ((5, 50), (15, 50), (5, 200)):
        for more in ((raters * 3, prompts), (raters, 200)):
            assert by[more].half_width <= by[raters, prompts].half_width
            assert by[more].difference >= by[raters, prompts].difference
            assert by[more].equivalence >= by[raters, prompts].equivalence
    text = format_power(rows, 0.08, 0.8)
    assert "Sufficient to detect a preference of 58% with probability 80%: " in text
    assert "45 raters × 200 prompts" in text
    assert "none of these" in format_power(rows, 0.08, 0.9999)


def test_large_designs_have_full_power() -> None:
    rows = power_table(PowerConfig(raters=[30, 100, 300], prompts=[200, 1000, 10_000]), 5, 0.2)
    assert [row.difference for row in rows] == pytest.approx([1.0] * 9)


@pytest.mark.parametrize("votes", [1, 5])
@pytest.mark.parametrize("margin", [0.001, 0.49])
def test_power_of_designs_with_more_raters_than_votes_and_of_extreme_votes(votes: int, margin: float) -> None:
    """Numbers are finite and possible, and raters without votes change nothing."""
    designs: list[dict[str, Any]] = [{}, {"prompt_sd": 10, "rater_sd": 10, "ties": 0.999999}, {"rater_sd": 0}]
    for changes in designs:
        config = PowerConfig(raters=[2, 50 * votes, 1000], prompts=[2, 50], **changes)
        rows = power_table(config, votes, margin)
        for row in rows:
            assert 0 < row.half_width <= 0.5 and 0 < row.difference <= 1 and 0 <= row.equivalence <= 1
        as_many, more = (row for row in rows if row.prompts == 50 and row.raters > 2)
        assert (more.half_width, more.difference) == pytest.approx((as_many.half_width, as_many.difference))


def test_deviations_beyond_the_accuracy_of_the_integration_are_refused() -> None:
    with pytest.raises(RequestError, match=r"power\.prompt_sd and power\.rater_sd must be at most 10"):
        power_table(PowerConfig(rater_sd=10.1), 5, 0.1)


def test_independent_votes_have_the_power_of_independent_votes() -> None:
    (row,) = power_table(PowerConfig(raters=[1000], prompts=[50], ties=0), 1, 0.1)
    assert row.half_width == pytest.approx(t.ppf(0.975, 49) * (0.25 / 50) ** 0.5)


def test_chosen_shares_are_not_rounded_to_whole_percentages() -> None:
    text = format_power(power_table(PowerConfig(raters=[1000], prompts=[50]), 1, 0.025), 0.025, 0.9999)
    assert "detect a preference of 52.5% with probability 99.99%" in text
    assert "between 47.5% and 52.5%" in text
    assert text.splitlines()[1].split()[2] == "0.05"  # votes per rater


# --- strengths ---


@settings(max_examples=15)
@given(seeds, st.integers(2, 5))
def test_strengths_maximise_the_likelihood(seed: int, count: int) -> None:
    wins = np.random.default_rng(seed).integers(0, 30, (count, count)) * 0.5
    np.fill_diagonal(wins, 0)
    padded = (wins + PRIOR) * (1 - np.eye(count))

    def cost(theta: np.ndarray) -> float:
        return -float((padded * np.log(expit(theta[:, None] - theta[None, :]))).sum())

    best = minimize(cost, np.zeros(count), tol=1e-10).x
    found = bradley_terry(wins)
    assert found == pytest.approx(best - best.mean(), abs=1e-4)
    assert cost(found) <= cost(best) + 1e-9


def test_strengths_match_published_ones() -> None:
    """Compare with the American League of 1987 in Agresti, "Categorical Data Analysis" (2002), section 10.6."""
    wins = np.array(
        [
            [0, 7, 9, 7, 7, 9, 11],  # Milwaukee, against the teams of the columns, in this order
            [6, 0, 7, 5, 11, 9, 9],  # Detroit
            [4, 6, 0, 7, 7, 8, 12],  # Toronto
            [6, 8, 6, 0, 6, 7, 10],  # New York
            [6, 2, 6, 7, 0, 7, 12],  # Boston
            [4, 4, 5, 6, 6, 0, 6],  # Cleveland
            [2, 4, 1, 3, 1, 7, 0],  # Baltimore
        ]
    )
    found = bradley_terry(wins - PRIOR)
    assert found - found[-1] == pytest.approx([1.58, 1.44, 1.29, 1.25, 1.11, 0.68, 0], abs=0.005)


def test_two_models_in_closed_form() -> None:
    """Compare with Haldane and Anscombe's log odds, including a model that lost every vote."""
    for won, lost in ((30.5, 10), (20, 0)):
        theta = bradley_terry(np.array([[0, won], [lost, 0]]))
        assert theta[0] - theta[1] == pytest.approx(np.log((won + 0.5) / (lost + 0.5)))
        assert shares(theta)[0] == pytest.approx((won + 0.5) / (won + lost + 1))


@pytest.mark.parametrize("count", [3, 6])
@pytest.mark.parametrize("votes", [5, 1000, 100_000])
def test_models_that_won_or_lost_every_vote_have_finite_strengths(count: int, votes: int) -> None:
    """At the maximum, expected wins equal observed wins."""
    wins = np.triu(np.full((count, count), float(votes)), 1)
    theta, padded = bradley_terry(wins), (wins + PRIOR) * (1 - np.eye(count))
    games = padded + padded.T
    assert (games * expit(theta[:, None] - theta)).sum(1) == pytest.approx(padded.sum(1), rel=1e-9)
    assert (np.diff(theta) < 0).all() and theta.sum() == pytest.approx(0, abs=1e-9)


def test_strengths_and_their_intervals() -> None:
    """The interval of a strong model is above those of two others, and narrower with more raters."""
    rng = np.random.default_rng(0)
    widths = []
    for num_raters in (4, 40):
        prompts, raters, pair = (part.ravel() for part in np.indices((20, num_raters, 3)))
        pairs = np.array([(0, 1), (0, 2), (1, 2)])[pair]
        felt = np.array([1.0, 0.0, 0.0])[pairs] @ [1, -1] + rng.normal(scale=0.5, size=num_raters)[raters]
        scores = (rng.random(len(felt)) < expit(felt)).astype(float)
        found = strengths(scores, pairs, prompts, raters, 3, seed=0, replicates=200)
        assert (found.low < found.value).all() and (found.value < found.high).all()
        assert (found.share_low < found.share).all() and (found.share < found.share_high).all()
        assert found.value.sum() == pytest.approx(0) and found.share.mean() == pytest.approx(0.5)
        widths.append(found.high - found.low)
        again = strengths(scores, pairs, prompts, raters, 3, seed=0, replicates=200)
        assert (again.low == found.low).all()
    assert found.share_low[0] > max(found.share_high[1:])
    assert (widths[1] < widths[0]).all()


@pytest.mark.parametrize("single", [0, 1])
def test_one_prompt_or_one_rater_gives_unbounded_strengths(single: int) -> None:
    """One rater says nothing about other raters, so the interval of `preference` is [0, 1] as well."""
    pairs = np.tile([(0, 1), (0, 2), (1, 2)], (20, 1))
    clusters = [np.arange(20).repeat(3), np.zeros(60, int)]
    prompts, raters = clusters[single], clusters[1 - single]
    scores = np.random.default_rng(0).integers(0, 2, 60).astype(float)
    found = strengths(scores, pairs, prompts, raters, 3, seed=0, replicates=20)
    assert (found.low == -np.inf).all() and (found.high == np.inf).all() and np.isfinite(found.value).all()
    assert (found.share_low == 0).all() and (found.share_high == 1).all()
    assert preference(scores, prompts, raters).interval() == pytest.approx((0, 1))


@pytest.mark.parametrize("deciding", [0, 1])
def test_both_prompts_and_raters_are_resampled(deciding: int) -> None:
    """If one of the two determines every vote, the variance of the share is p·(1 − p)/G over its clusters."""
    clusters = [part.ravel() for part in np.indices((16, 16))]
    scores = (clusters[deciding] % 4 == 0).astype(float)
    pairs = np.tile([0, 1], (len(scores), 1))
    found = strengths(scores, pairs, clusters[0], clusters[1], 2, seed=1)
    expected = 2 * 1.96 * np.sqrt(0.25 * 0.75 / 16)
    assert found.share_high[0] - found.share_low[0] == pytest.approx(expected, rel=0.12)
