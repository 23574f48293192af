"""How often a blind study's intervals hold what they are said to hold: `python -m bench.outputs.study`.

Studies are simulated with prompts and raters that lean to one model or the other, each vote keyed as the schedule deals
it. Each interval is computed as `python -m evaluation.study analyse` computes it; what it estimates is known. Beside it
stand Wilson's interval of independent votes, and the one that clusters by prompt alone.
"""

import argparse
from collections.abc import Callable

import numpy as np
from scipy.stats import norm

from bench.kit.common import section, table
from bench.kit.studies import Design, share_of
from evaluation.study.statistics.leanings import Leanings
from evaluation.study.statistics.power import weigh
from evaluation.study.statistics.preference import Preference, preference
from evaluation.study.statistics.strengths import strengths

PROMPTS, RATERS, VOTES = 200, 15, 5
DESIGNS = {
    "200 prompts, 15 raters": (PROMPTS, RATERS),
    "100 prompts, 6 raters": (100, 6),
    "20 prompts, 15 raters": (20, RATERS),
}
SPREADS = ((0.5, 0.2), (1.0, 0.4), (1.5, 1.0))
"""Deviations between prompts and between raters, in log odds."""
OTHERS = ((0.0, 0.0), (1.0, 0.0), (0.0, 0.8))
MEANS = ((0.0, 0.0), (0.5, 0.2), (1.5, 0.2))
"""Mean log odds and share of ties."""
MARGIN = 0.05

Interval = Callable[[np.ndarray, Design], tuple[np.ndarray, np.ndarray]]


def ours(scores: np.ndarray, design: Design) -> tuple[np.ndarray, np.ndarray]:
    """Clustered by prompt and rater."""
    return preference(scores, design.prompts, design.raters).interval()


def wilson(scores: np.ndarray, design: Design) -> tuple[np.ndarray, np.ndarray]:
    """Of votes as if they were independent."""
    value = scores.mean(-1)
    return Preference(value, value, np.full_like(value, np.inf), np.full_like(value, scores.shape[-1])).interval()


def by_prompt(scores: np.ndarray, design: Design) -> tuple[np.ndarray, np.ndarray]:
    """Of the prompts' means, which are independent where raters do not differ."""
    num_prompts = int(design.prompts.max()) + 1
    means = scores.reshape(len(scores), num_prompts, -1).mean(-1)
    half = norm.ppf(0.975) * means.std(-1, ddof=1) / num_prompts**0.5
    return means.mean(-1) - half, means.mean(-1) + half


def holds(interval: Interval, leanings: Leanings, design: Design, draws: int) -> float:
    """The share of simulated studies whose interval holds the true preference."""
    truth = leanings.preference

    def test(scores: np.ndarray) -> np.ndarray:
        low, high = interval(scores, design)
        return (low <= truth) & (truth <= high)

    return share_of(test, leanings, design, draws, seed=0)


def coverage(draws: int) -> str:
    """The table of preferences."""
    rows = []
    settings = [("200 prompts, 15 raters", spread, mean) for spread in (*SPREADS, *OTHERS) for mean in MEANS]
    settings += [(name, spread, mean) for name in list(DESIGNS)[1:] for spread in SPREADS for mean in MEANS]
    for name, (prompt_sd, rater_sd), (mean, ties) in settings:
        leanings = Leanings(prompt_sd, rater_sd, mean, ties)
        design = Design.make(*DESIGNS[name], VOTES)
        shares = [f"{holds(interval, leanings, design, draws):.1%}" for interval in (ours, by_prompt, wilson)]
        rows.append([name, prompt_sd, rater_sd, f"{leanings.preference:.1%}", f"{ties:.0%}", *shares])
    header = ["study", "prompts' deviation", "raters'", "true preference", "ties"]
    return table([*header, "holds it", "by prompt alone", "Wilson"], rows)


def equivalence(draws: int) -> str:
    """How often equivalence is shown: at the margin, where it must be at most 5 %, and where models are equal."""
    rows = []
    for prompt_sd, rater_sd in SPREADS:
        for raters, prompts in ((RATERS, PROMPTS), (30, 400)):
            leanings, design = Leanings(prompt_sd, rater_sd, ties=0.2), Design.make(prompts, raters, VOTES)
            at_margin, where_equal = (shows(leanings.at(0.5 + apart), design, draws) for apart in (MARGIN, 0.0))
            predicted = weigh(leanings, raters, prompts, VOTES, MARGIN).equivalence
            shares = [f"{share:.1%}" for share in (at_margin, where_equal, predicted)]
            rows.append([raters, prompts, prompt_sd, rater_sd, *shares])
    header = ["raters", "prompts", "prompts' deviation", "raters'", "shown at the margin", "shown where equal"]
    return table([*header, "predicted"], rows)


def shows(leanings: Leanings, design: Design, draws: int) -> float:
    """The share of simulated studies that show equivalence."""

    def test(scores: np.ndarray) -> np.ndarray:
        return preference(scores, design.prompts, design.raters).is_within(MARGIN)

    return share_of(test, leanings, design, draws, seed=1)


def three_models(draws: int, replicates: int = 300) -> str:
    """How often the strengths' intervals hold the true ones: of three models, two equal and one weaker."""
    rows = []
    for prompt_sd, rater_sd in SPREADS:
        held, widths = [], []
        for seed in range(draws):
            scores, pairs, design, truth = _three(prompt_sd, rater_sd, seed)
            found = strengths(scores, pairs, design.prompts, design.raters, 3, seed, replicates)
            held.append((found.share_low <= truth) & (truth <= found.share_high))
            widths.append((found.share_high - found.share_low) / 2)
        rows.append([prompt_sd, rater_sd, f"{np.mean(held):.1%}", f"{np.mean(widths):.3f}"])
    return table(["prompts' deviation", "raters'", "holds it", "mean half-width"], rows)


def _three(prompt_sd: float, rater_sd: float, seed: int) -> tuple[np.ndarray, np.ndarray, Design, np.ndarray]:
    """Scores, pairs, who voted, and the true shares: each model has leanings of its own, of prompts and raters."""
    rng = np.random.default_rng(seed)
    pair_of = np.array([(0, 1), (0, 2), (1, 2)])
    count = PROMPTS // 2
    dealt = Design.make(3 * count, RATERS, VOTES)
    design = Design(dealt.prompts // 3, dealt.raters)
    pairs = pair_of[dealt.prompts % 3]
    mean = np.array([0.25, 0.25, -0.5])
    a = mean + rng.normal(scale=prompt_sd / 2**0.5, size=(count, 3))
    b = rng.normal(scale=rater_sd / 2**0.5, size=(RATERS, 3))
    worth = a[design.prompts] + b[design.raters]
    rows = np.arange(len(pairs))
    felt = worth[rows, pairs[:, 0]] - worth[rows, pairs[:, 1]] + rng.logistic(size=len(pairs))
    equal = Leanings(prompt_sd, rater_sd).preference
    apart = Leanings(prompt_sd, rater_sd, 0.75).preference
    wins = np.array([[0, equal, apart], [equal, 0, apart], [1 - apart, 1 - apart, 0]])
    return (felt > 0).astype(float), pairs, design, wins.sum(-1) / 2


def main() -> None:
    """Simulate, and print the tables."""
    parser = argparse.ArgumentParser(prog="bench.outputs.study", description=__doc__)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--strength_draws", type=int, default=400)
    options = parser.parse_args()
    titles = {"Preference": coverage(options.draws), f"Equivalence within ±{MARGIN}": equivalence(options.draws)}
    titles["Strengths of three models"] = three_models(options.strength_draws)
    print(
        section("Blind studies", "bench.outputs.study", "\n\n".join(f"{at}:\n\n{body}" for at, body in titles.items()))
    )


if __name__ == "__main__":
    main()
