"""How many raters and prompts a margin needs, before the study.

Variances are those that `preference` estimates, in closed form for the model of `leanings`. Quantiles are
Student's.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from scipy.stats import nct, t

from evaluation.metrics.intervals import COVERAGE
from evaluation.study.statistics.leanings import NODES, WEIGHTS, Leanings, expected, tied
from shards.base.config import Config
from shards.base.table import format_table

Several = Annotated[int, Field(ge=2)]
"""One alone says nothing of how others differ."""


class PowerConfig(Config):
    """Which studies are weighed, and how much raters and prompts are thought to differ."""

    raters: list[Several] = Field([5, 10, 15, 20, 30], min_length=1)
    """Numbers of raters: the table's rows."""
    prompts: list[Several] = Field([50, 100, 200, 400], min_length=1)
    """Numbers of prompts: its columns."""
    prompt_sd: float = Field(1.0, ge=0)
    """How far prompts differ in which model they favour, in log odds."""
    rater_sd: float = Field(0.4, ge=0)
    """How far raters do."""
    ties: float = Field(0.2, ge=0, lt=1)
    """Share of votes that are ties."""
    wanted: float = Field(0.8, gt=0, lt=1)
    """The power that is called enough."""


@dataclass(frozen=True)
class Power:
    raters: int
    prompts: int
    votes_per_rater: float
    half_width: float
    """Of the 95 % interval, where the models are equal."""
    difference: float
    """Probability that the interval leaves out a half, where the preference is a half and the margin."""
    equivalence: float
    """Probability that equivalence within the margin is shown, where the models are equal."""


def components(leanings: Leanings) -> tuple[float, float, float]:
    """Variances of a vote's worth: between prompts, between raters, and what is left."""
    threshold = leanings.threshold
    d = leanings.mean + NODES[:, None] * leanings.prompt_sd + NODES[None, :] * leanings.rater_sd
    worth = expected(d, threshold)  # (prompts, raters)
    mean = WEIGHTS @ worth @ WEIGHTS
    of_prompts = float(WEIGHTS @ (worth @ WEIGHTS - mean) ** 2)
    of_raters = float(WEIGHTS @ (WEIGHTS @ worth - mean) ** 2)
    square = worth - tied(d, threshold) / 4  # E[y²] = P(won) + P(tie)/4
    total = float(WEIGHTS @ square @ WEIGHTS - mean**2)
    return of_prompts, of_raters, total - of_prompts - of_raters


def spread(leanings: Leanings, raters: int, prompts: int, votes: int) -> tuple[float, float]:
    """Variance of the preference and its degrees of freedom, for a design in which all have equally many votes."""
    of_prompts, of_raters, rest = components(leanings)
    count = prompts * votes
    alone = (of_prompts + of_raters + rest) / count
    by_prompt = of_prompts / prompts + (of_raters + rest) / count
    by_rater = of_raters / raters + (of_prompts + rest) / count
    variance = by_prompt + by_rater - alone
    spreads = by_prompt**2 / (prompts - 1) + by_rater**2 / (raters - 1) - 2 * alone**2 / count
    return variance, variance**2 / spreads


def weigh(leanings: Leanings, raters: int, prompts: int, votes: int, margin: float) -> Power:
    """A study's power to show a difference of `margin`, and to show equivalence within it."""
    equal, apart = leanings.at(0.5), leanings.at(0.5 + margin)
    variance, degrees = spread(apart, raters, prompts, votes)
    quantile = t.ppf((1 + COVERAGE) / 2, degrees)
    noncentral = margin / variance**0.5
    difference = nct.sf(quantile, degrees, noncentral) + nct.cdf(-quantile, degrees, noncentral)
    variance, degrees = spread(equal, raters, prompts, votes)
    room = margin / variance**0.5 - t.ppf(COVERAGE, degrees)
    equivalence = max(0.0, 2 * t.cdf(room, degrees) - 1)
    half = t.ppf((1 + COVERAGE) / 2, degrees) * variance**0.5
    return Power(raters, prompts, prompts * votes / raters, float(half), float(difference), float(equivalence))


def power_table(config: PowerConfig, votes_per_item: int, margin: float) -> list[Power]:
    """Every number of raters with every number of prompts; with fewer raters than votes of an item, each votes once."""
    leanings = Leanings(config.prompt_sd, config.rater_sd, ties=config.ties)
    return [
        weigh(leanings, raters, prompts, min(votes_per_item, raters), margin)
        for raters in config.raters
        for prompts in config.prompts
    ]


def render(rows: list[Power], margin: float, wanted: float) -> str:
    cells = [["raters", "prompts", "votes of each", "half-width", "difference", "equivalence"]]
    for row in rows:
        cells.append([str(row.raters), str(row.prompts), f"{row.votes_per_rater:.0f}", f"{row.half_width:.3f}"])
        cells[-1] += [f"{row.difference:.0%}", f"{row.equivalence:.0%}"]
    purposes = {
        "difference": f"see a preference of {0.5 + margin:.0%}",
        "equivalence": f"show equal models to be within {0.5 - margin:.0%} and {0.5 + margin:.0%}",
    }
    said = []
    for name, purpose in purposes.items():
        fewest: dict[int, int] = {}
        for row in rows:
            if getattr(row, name) >= wanted:
                fewest[row.raters] = min(row.prompts, fewest.get(row.raters, row.prompts))
        enough = ", ".join(f"{raters} raters × {prompts} prompts" for raters, prompts in fewest.items())
        said.append(f"Enough to {purpose} with probability {wanted:.0%}: {enough or 'none of these'}.")
    return "\n".join([format_table(cells), "", *said])
