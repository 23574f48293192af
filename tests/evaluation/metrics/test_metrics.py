"""Check metrics against closed forms, scipy, plain loops, and properties that they must have."""

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from scipy.optimize import brentq
from scipy.spatial.distance import cdist
from scipy.stats import binomtest
from scipy.stats import t as student

from evaluation.metrics.frechet import (
    GroupSums,
    Moments,
    check_enough,
    frechet_at_n,
    frechet_distance,
    frechet_infinity,
)
from evaluation.metrics.intervals import (
    GROUPS,
    MIN_CLUSTERS,
    MIN_DEVIATIONS,
    Jackknife,
    groups_of,
    jackknife,
    mean_interval,
    share_interval,
    wilson,
)
from evaluation.metrics.kernels import cmmd, kid
from evaluation.metrics.manifold import covered, precision, recall
from evaluation.metrics.table import METRICS, MetricInputs, clip_score, metric_id
from shards.base.errors import RequestError

seeds = st.integers(0, 2**32 - 1)


def features(seed: int, count: int = 120, dimensions: int = 5, shift: float = 0.0) -> np.ndarray:
    """Return correlated, skewed features."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(dimensions, dimensions))
    return rng.gamma(2.0, size=(count, dimensions)) @ mixing + shift


# --- Fréchet ---


@settings(max_examples=25)
@given(st.integers(1, 6), seeds)
def test_frechet_distance_matches_its_closed_form_for_diagonal_covariances(dimensions: int, seed: int) -> None:
    """The closed form is Σ (m₁ − m₂)² + (s₁ − s₂)²."""
    rng = np.random.default_rng(seed)
    m1, m2 = rng.normal(size=(2, dimensions))
    s1, s2 = rng.uniform(0, 3, size=(2, dimensions))
    found = frechet_distance(Moments(m1, np.diag(s1**2)), Moments(m2, np.diag(s2**2)))
    assert found == pytest.approx(((m1 - m2) ** 2 + (s1 - s2) ** 2).sum(), abs=1e-9)


@settings(max_examples=25)
@given(seeds)
def test_frechet_distance_matches_scipy_and_is_symmetric_and_invariant_to_rotation(seed: int) -> None:
    x, y = features(seed), features(seed + 1, shift=1)
    a, b = Moments.of(x), Moments.of(y)
    root = np.real(sqrtm(np.cov(x, rowvar=False) @ np.cov(y, rowvar=False)))
    gap = x.mean(0) - y.mean(0)
    expected = gap @ gap + np.trace(np.cov(x, rowvar=False) + np.cov(y, rowvar=False) - 2 * root)
    found = frechet_distance(a, b)
    assert found == pytest.approx(expected, rel=1e-6)
    assert found == pytest.approx(frechet_distance(b, a), rel=1e-6) and found > 0
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-6)
    rotation, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(5, 5)))
    assert frechet_distance(Moments.of(x @ rotation), Moments.of(y @ rotation)) == pytest.approx(found, rel=1e-6)


def test_moments_without_groups_match_those_of_the_other_samples() -> None:
    x, groups = features(0) + 1000, groups_of(np.arange(120) // 2)
    sums = GroupSums(x, groups)
    for left_out in ((), (3,), (2, 9)):
        found, expected = sums.without(left_out), Moments.of(x[~np.isin(groups, left_out)])
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-12)
        np.testing.assert_allclose(found.covariance, expected.covariance, rtol=1e-9, atol=1e-9)


def test_bias_at_n_samples_and_at_infinity() -> None:
    """For two samples of N from the same white Gaussian, E[FID] is (2d + d(d + 1)/2)/N, and 0 at infinity."""
    d, count, draws = 16, 400, 40
    rng = np.random.default_rng(5)
    pairs = [(rng.normal(size=(count, d)), rng.normal(size=(count, d))) for _ in range(draws)]
    at_n = [frechet_distance(Moments.of(x), Moments.of(y)) for x, y in pairs]
    bias = (2 * d + d * (d + 1) / 2) / count
    assert np.mean(at_n) == pytest.approx(bias, rel=0.05)
    at_infinity = [frechet_infinity(x, np.arange(count), y).value for x, y in pairs]
    assert abs(np.mean(at_infinity)) < 3 * np.std(at_infinity) / draws**0.5
    assert abs(np.mean(at_infinity)) < bias / 10


@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_the_distance_between_equal_distributions_is_not_negative(shift: float) -> None:
    for seed in range(20):
        moments = Moments.of(features(seed, shift=shift))
        assert 0 <= frechet_distance(moments, moments) < 1e-8


def test_too_few_samples_are_refused() -> None:
    x, reference = features(0, count=25, dimensions=22), features(1, count=200, dimensions=22)
    with pytest.raises(
        RequestError,
        match=r"22-dimensional features needs at least 23 images outside the 2 largest of 12 groups, .* but the sample "
        r"set has only 20 of its 25 images there\. .* Use about 29 images or more",
    ):
        frechet_at_n(x, np.arange(25), Moments.of(reference))
    few = MetricInputs(reference, np.arange(200), x, None)
    for name in ("fid", "fid_infinity"):
        with pytest.raises(RequestError, match="the reference has only 20 of its 25 images there"):
            METRICS[name].compute(few)
    with pytest.raises(RequestError, match="the sample set has only 20 of its 25 images there"):
        frechet_infinity(x, np.arange(25), reference)
    check_enough(np.arange(29), 22)  # exactly the minimum
    with pytest.raises(RequestError, match="the reference has only 22 of its 28 images there"):
        check_enough(np.arange(28), 22, "the reference")
    METRICS["kid"].compute(MetricInputs(reference, np.arange(200), reference[:MIN_CLUSTERS], None))


def test_the_minimum_number_of_samples_accounts_for_uneven_groups() -> None:
    """25 prompts with 5 images each are divided into one group of three prompts and eleven groups of two."""
    x, clusters = features(0, count=125, dimensions=100), np.repeat(np.arange(25), 5)
    with pytest.raises(RequestError, match="the sample set has only 100 of its 125 images there"):
        frechet_at_n(x, clusters, Moments.of(x))
    check_enough(clusters, 99)


@settings(max_examples=50)
@given(st.integers(24, 60), st.integers(1, 5), st.integers(1, 80))
def test_enough_samples_leave_a_nonsingular_covariance(prompts: int, per_prompt: int, dimensions: int) -> None:
    clusters = np.repeat(np.arange(prompts), per_prompt)
    groups = groups_of(clusters)
    fewest = min((~np.isin(groups, pair)).sum() for pair in combinations(range(GROUPS), 2))
    if fewest > dimensions:
        check_enough(clusters, dimensions)
    else:
        with pytest.raises(RequestError, match=f"has only {fewest} of its {len(clusters)} images there"):
            check_enough(clusters, dimensions)


# --- properties of all metrics ---


@settings(max_examples=3)
@given(seeds)
def test_metrics_are_invariant_to_order_and_rotation(seed: int) -> None:
    """Order may matter only through the assignment to groups, which `fid_infinity` depends on."""
    rng = np.random.default_rng(seed)
    x, y, texts = features(seed), features(seed + 1, count=100, shift=0.2), features(seed + 2)
    clusters = np.repeat(np.arange(60), 2)
    rotation, _ = np.linalg.qr(rng.normal(size=(5, 5)))
    rows, others = rng.permutation(120), rng.permutation(100)
    for name, metric in METRICS.items():
        found = metric.compute(MetricInputs(x, clusters, y, texts))
        assert found.low <= found.value <= found.high, name
        turned = MetricInputs(x @ rotation, clusters, y @ rotation, texts @ rotation)
        rotated = metric.compute(turned)
        ends = [found.value, found.low, found.high]
        assert [rotated.value, rotated.low, rotated.high] == pytest.approx(ends, rel=1e-6, abs=1e-9), name
        if name != "fid_infinity":
            mixed = MetricInputs(x[rows], clusters[rows], y[others], texts[rows])
            shuffled = metric.compute(mixed)
            assert shuffled.value == pytest.approx(found.value, rel=1e-9, abs=1e-12), name
        if metric.better == "higher":
            assert 0 <= found.value <= (100 if name == "clip_score" else 1), name


# --- kernels ---


def mmd_by_loops(x: np.ndarray, y: np.ndarray, clusters: np.ndarray, kernel) -> float:  # type: ignore[no-untyped-def]
    """Compute MMD² from its definition."""
    within = [kernel(x[i], x[j]) for i, j in product(range(len(x)), repeat=2) if clusters[i] != clusters[j]]
    others = [kernel(y[i], y[j]) for i, j in product(range(len(y)), repeat=2) if i != j]
    between = [kernel(a, b) for a in x for b in y]
    return float(np.mean(within) + np.mean(others) - 2 * np.mean(between))


@pytest.mark.parametrize("per_prompt", [1, 3])
def test_kernel_distances_match_their_definition(per_prompt: int) -> None:
    x, y, clusters = features(0, count=48), features(1, count=40, shift=0.3), np.arange(48) // per_prompt
    assert kid(x, clusters, y).value == pytest.approx(mmd_by_loops(x, y, clusters, lambda a, b: (a @ b / 5 + 1) ** 3))
    unit_x, unit_y = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (x, y))
    expected = mmd_by_loops(unit_x, unit_y, clusters, lambda a, b: np.exp(-((a - b) @ (a - b)) / 200))
    assert cmmd(x, clusters, y).value == pytest.approx(1000 * expected)


def test_kid_is_unbiased() -> None:
    """The mean over draws from equal distributions is 0, which is not true of the biased estimator."""
    rng = np.random.default_rng(3)
    found = [kid(rng.normal(size=(48, 4)), np.arange(48), rng.normal(size=(48, 4))).value for _ in range(40)]
    assert abs(np.mean(found)) < 3 * np.std(found) / 40**0.5


# --- precision and recall ---


def manifold_by_loops(points: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return whether each query is inside the ball around a point that reaches to its third neighbour."""
    radii = np.sort(cdist(points, points), axis=1)[:, 3]
    return (cdist(queries, points) <= radii).any(1)


@settings(max_examples=10)
@given(seeds)
def test_precision_and_recall_match_their_definition(seed: int) -> None:
    x, y = features(seed, count=80), features(seed + 1, count=70, shift=2)
    found = precision(x, np.arange(80), y), recall(x, np.arange(80), y)
    assert found[0].value == manifold_by_loops(y, x).mean()
    assert found[1].value == manifold_by_loops(x, y).mean()
    assert all(estimate.low <= estimate.value <= estimate.high for estimate in found)
    assert precision(x, np.arange(80), x).value == recall(x, np.arange(80), x).value == 1


@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_a_ball_includes_its_surface(offset: float) -> None:
    """The ball around 0 reaches to 0.75, its third neighbour, even if all features are far from the origin."""
    points, queries = np.array([[0.0], [0.25], [0.5], [0.75]]), np.array([[-0.75], [-0.875]])
    assert covered(queries + offset, points + offset).tolist() == [True, False]


# --- scores and intervals ---


def test_clip_score_matches_a_computation_by_hand() -> None:
    pictures, texts = np.array([[3.0, 4.0], [1.0, 0.0], [1.0, 0.0]]), np.array([[3.0, 4.0], [1.0, 1.0], [-1.0, 0.0]])
    found = clip_score(MetricInputs(pictures, np.arange(3), None, texts))
    assert found.value == pytest.approx((100 + 100 / 2**0.5 + 0) / 3)


@pytest.mark.parametrize(("unbiased", "linear"), [(2.0, 0.04), (2.0, 0.0), (0.1, 0.04), (-0.3, 0.04), (0.0, 0.0)])
def test_interval_ends_solve_the_equation_in_the_docstring(unbiased: float, linear: float) -> None:
    """Except that the interval is cut off at 0. Without a linear part, it is Student's interval. Even for a negative
    estimate, which is reported as it is, the interval is more than a single point."""
    found = Jackknife(unbiased + 0.1, unbiased, 0.05, linear).interval("")
    assert found.value == unbiased + 0.1 and 0 <= found.low < found.high
    slope = linear / max(unbiased, MIN_DEVIATIONS * 0.05**0.5)
    t2 = student.ppf(0.975, GROUPS - 1) ** 2
    center = max(found.value, 0.0)

    def excess(end: float) -> float:
        return (end - center) ** 2 - t2 * (0.05 + slope * (end - center))

    assert excess(found.high) == pytest.approx(0, abs=1e-12)
    assert excess(found.low) == pytest.approx(0, abs=1e-12) or (found.low == 0 and excess(0.0) < 0)
    if found.low > 0:
        up, down = found.high - center, center - found.low
        assert up > down > 0 if linear else up == pytest.approx(down)
    for value in (0.5, 0.0):
        same = Jackknife(value, value, 0.0, 0.0).interval("")
        assert (same.low, same.high) == (value, value)


def test_the_interval_of_a_bounded_mean_stays_within_its_bounds() -> None:
    features, texts = np.eye(4, 8), np.vstack([np.eye(3, 8, 5), np.eye(1, 8, 3)])  # one image fits its prompt
    inputs = MetricInputs(features, np.arange(4), None, texts)
    found = clip_score(inputs)
    assert found.value == pytest.approx(25) and found.low == 0 and found.high <= 100


def test_mean_interval_matches_the_textbook_over_prompts() -> None:
    values = np.array([1.0, 2.0, 4.0, 9.0])
    found = mean_interval(values, np.arange(4), "")
    assert found.value == 4 and found.high - found.value == pytest.approx(3.182446 * values.std(ddof=1) / 2)
    repeated = mean_interval(np.repeat(values, 5), np.repeat(np.arange(4), 5), "")
    assert repeated.high == pytest.approx(found.high)  # equal images of a prompt add no information


@pytest.mark.parametrize("hits", [0, 1, 700, 2000])
def test_share_interval_matches_wilsons(hits: int) -> None:
    values = np.arange(2000) < hits
    found, expected = share_interval(values, np.arange(2000), ""), binomtest(hits, 2000).proportion_ci(method="wilson")
    assert (found.low, found.high) == (pytest.approx(expected.low, abs=1e-4), pytest.approx(expected.high, abs=1e-4))


def test_share_interval_counts_equal_images_of_a_prompt_once() -> None:
    """Four equal images for each of 50 prompts are worth 49 samples, since the variance is estimated from 50.

    Wilson's bounds are the roots p of (p - share)² = q² p (1 - p) / n.
    """
    hits = np.repeat(np.arange(50) < 40, 4)
    found = share_interval(hits, np.repeat(np.arange(50), 4), "")
    quantile = student.ppf(0.975, 49)

    def distance(p: float) -> float:
        return (p - 0.8) ** 2 - quantile**2 * p * (1 - p) / 49

    assert (found.low, found.high) == pytest.approx((brentq(distance, 0, 0.8), brentq(distance, 0.8, 1)))


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_matches_published_values(hits: int, count: int, low: float, high: float) -> None:
    """Newcombe, "Two-sided confidence intervals for the single proportion", Statistics in Medicine, 1998, table I."""
    assert wilson(hits / count, count, 1.959964) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_wilsons_interval_contains_the_share() -> None:
    for share in (0.0, 1.0):
        for count in range(1, 200):
            low, high = wilson(share, float(count), 1.959964)
            assert 0 <= low <= share <= high <= 1, count


@settings(max_examples=20)
@given(seeds)
def test_jackknife_of_the_mean_and_the_squared_mean(seed: int) -> None:
    """The mean has its textbook variance and no bias; its square has a known unbiased estimate."""
    x = np.random.default_rng(seed).normal(size=GROUPS)

    def mean_without(left_out: tuple[int, ...]) -> float:
        return float(np.delete(x, left_out).mean())

    mean, square = jackknife(mean_without), jackknife(lambda left_out: mean_without(left_out) ** 2)
    assert mean.unbiased == pytest.approx(x.mean()) and mean.variance == pytest.approx(x.var(ddof=1) / GROUPS)
    assert square.unbiased == pytest.approx(x.mean() ** 2 - x.var(ddof=1) / GROUPS)


def test_jackknife_variance_by_efron_and_stein() -> None:
    """The terms of the docstring of `jackknife`, in loops, for a statistic that is mostly linear."""
    x = np.random.default_rng(3).normal(1.0, size=GROUPS)
    n, whole = GROUPS, x.mean() ** 2
    one = [np.delete(x, i).mean() ** 2 for i in range(n)]
    first = (n - 1) / n * sum((value - np.mean(one)) ** 2 for value in one)
    pairs = [
        n * whole - (n - 1) * (one[i] + one[j]) + (n - 2) * np.delete(x, [i, j]).mean() ** 2
        for i in range(n)
        for j in range(i)
    ]
    second = sum((value - np.mean(pairs)) ** 2 for value in pairs) / (n * (n - 1))
    found = jackknife(lambda left_out: float(np.delete(x, left_out).mean() ** 2))
    assert 0 < second < 0.2 * first
    assert (found.variance, found.linear) == (pytest.approx(first - second), pytest.approx(first - 2 * second))


def test_jackknife_variance_of_a_second_order_statistic_is_not_doubled() -> None:
    """Var(|x̄|²) = 2d/n² for the mean of d white dimensions with mean 0. The plain jackknife gives about twice that."""
    d, draws = 20, 300
    rows = np.random.default_rng(1).normal(size=(draws, GROUPS, d))
    found = [
        jackknife(lambda left_out, x=x: float((np.delete(x, left_out, 0).mean(0) ** 2).sum())).variance  # type: ignore[misc]
        for x in rows
    ]
    assert 1 <= np.mean(found) / (2 * d / GROUPS**2) <= 1.5


def test_groups_keep_prompts_together() -> None:
    clusters = np.repeat(np.random.default_rng(0).permutation(96), 3)
    groups = groups_of(clusters)
    assert all(len(set(groups[clusters == cluster])) == 1 for cluster in range(96))
    assert np.bincount(groups).tolist() == [24] * GROUPS
    assert np.array_equal(groups, groups_of(clusters + 7))  # they depend on the clusters' order, not on their ids
    # alternating kinds of prompts are in every group
    kinds = np.arange(600) % GROUPS
    shares = [np.bincount(kinds[groups_of(np.arange(600)) == group]).max() for group in range(GROUPS)]
    assert max(shares) < 15  # of 50; round-robin assignment would give 50


# --- identity ---


def test_metric_id_covers_everything_except_the_seed() -> None:
    drawing: dict[str, Any] = {"prompts": "p", "seed": 1, "num_samples": 5, "size": "64x64"}
    drawing |= {"setting": {"sampler": "own"}, "codec": "png"}
    parts = ("fid", {"kind": "inception", "resize": "x"}, drawing, "r")
    first = metric_id(*parts)
    assert metric_id(*parts[:2], drawing | {"seed": 2}, "r") == first
    others = [
        metric_id("kid", *parts[1:]),
        metric_id("fid", {"kind": "inception", "resize": "y"}, drawing, "r"),
        metric_id(*parts[:3], "s"),
        *(metric_id(*parts[:2], drawing | {key: "other"}, "r") for key in drawing if key != "seed"),
    ]
    assert len({first, *others}) == 1 + len(others)
