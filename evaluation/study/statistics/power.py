"""Power analysis: how many raters and prompts are needed to detect a given margin, or to show equivalence within it.

On prompt p, rater r favours the first model by d = mean + aₚ + bᵣ in log odds, where a and b are normal. Each vote adds
logistic noise to d, and is a tie if |d + noise| is below a threshold. For this `VoteModel`, the variances that
`preference` estimates from votes are computed by numerical integration. Student's t distribution gives the
quantiles (`stdtrit`) and probabilities (`stdtr`).
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field
from scipy.optimize import brentq
from scipy.special import expit, stdtr, stdtrit

from evaluation.metrics.intervals import COVERAGE
from shards.base.config import Config
from shards.base.errors import RequestError
from shards.base.table import format_table

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(64)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
"""Gauss-Hermite quadrature over a standard normal variable."""
MAX_SD = 10.0
"""Maximum standard deviation of aₚ and of bᵣ. At this limit, half-widths are off by up to 4 %, because the quadrature
nodes are too far apart for a score that is steep in comparison."""
Several = Annotated[int, Field(ge=2)]
"""Integer of at least two, because a single rater or prompt says nothing about how raters or prompts differ."""


class PowerConfig(Config):
    """Study designs to compare, and the assumed differences between raters and between prompts."""

    raters: list[Several] = Field([5, 10, 15, 20, 30], min_length=1)
    """Numbers of raters to compare."""
    prompts: list[Several] = Field([50, 100, 200, 400], min_length=1)
    """Numbers of prompts to compare, each combined with every number of raters."""
    prompt_sd: float = Field(1.0, ge=0)
    """How much the preference for one model varies between prompts: its standard deviation in log odds."""
    rater_sd: float = Field(0.4, ge=0)
    """How much the preference for one model varies between raters: its standard deviation in log odds."""
    ties: float = Field(0.2, ge=0, lt=1)
    """Share of votes that are ties."""
    wanted: float = Field(0.8, gt=0, lt=1)
    """Power that counts as sufficient."""


@dataclass(frozen=True)
class VoteModel:
    """Distribution of votes over a population of prompts and raters."""

    prompt_sd: float
    """Standard deviation of aₚ."""
    rater_sd: float
    """Standard deviation of bᵣ."""
    mean: float = 0.0
    ties: float = 0.0
    """Share of votes that are ties if the models are equal (mean 0)."""

    @property
    def sd(self) -> float:
        """Standard deviation of aₚ + bᵣ."""
        return float(np.hypot(self.prompt_sd, self.rater_sd))

    @property
    def threshold(self) -> float:
        """Largest |d + noise| that counts as a tie, chosen so that equal models get the share of ties in `ties`."""
        if not self.ties:
            return 0.0
        return float(
            brentq(lambda x: tie_probability(NODES * self.sd, x) @ WEIGHTS - self.ties, 0.0, 50.0 + 10 * self.sd)
        )

    @property
    def preference(self) -> float:
        """Share of votes for the first model over all prompts and raters, ties counting as halves."""
        return float(expected_score(self.mean + NODES * self.sd, self.threshold) @ WEIGHTS)

    def with_preference(self, preference: float) -> "VoteModel":
        """Return a copy whose mean is chosen so that the first model has this preference."""

        def shifted(mean: float) -> VoteModel:
            return VoteModel(self.prompt_sd, self.rater_sd, mean, self.ties)

        furthest = 50.0 + 20 * self.sd + self.threshold  # at this mean, every vote is for the first model
        return shifted(float(brentq(lambda mean: shifted(mean).preference - preference, -furthest, furthest)))


def expected_score(d: np.ndarray, threshold: float) -> np.ndarray:
    """Return the expected score of the first model for votes that favour it by `d`."""
    score: np.ndarray = (expit(d - threshold) + expit(d + threshold)) / 2
    return score


def tie_probability(d: np.ndarray, threshold: float) -> np.ndarray:
    """Return the probability of a tie for votes that favour the first model by `d`."""
    probability: np.ndarray = expit(d + threshold) - expit(d - threshold)
    return probability


@dataclass(frozen=True)
class DesignPower:
    """Precision and power of one study design."""

    raters: int
    prompts: int
    votes_per_rater: float
    half_width: float
    """Half the width of the 95 % interval if the models are equal."""
    difference: float
    """Probability that the interval excludes one half if the true preference is one half plus the margin."""
    equivalence: float
    """Probability of showing equivalence within the margin if the models are equal."""


def variance_components(model: VoteModel) -> tuple[float, float, float]:
    """Return the variance of a vote's score in three components: between prompts, between raters, and residual."""
    threshold = model.threshold
    d = model.mean + NODES[:, None] * model.prompt_sd + NODES[None, :] * model.rater_sd
    score = expected_score(d, threshold)  # (prompts, raters)
    mean = WEIGHTS @ score @ WEIGHTS
    between_prompts = float(WEIGHTS @ (score @ WEIGHTS - mean) ** 2)
    between_raters = float(WEIGHTS @ (WEIGHTS @ score - mean) ** 2)
    square = score - tie_probability(d, threshold) / 4  # E[y²] = P(won) + P(tie)/4
    total = float(WEIGHTS @ square @ WEIGHTS - mean**2)
    return between_prompts, between_raters, total - between_prompts - between_raters


def preference_variance(model: VoteModel, raters: int, prompts: int, votes: int) -> tuple[float, float]:
    """Return the variance and degrees of freedom of the preference, for `votes` evenly assigned votes per prompt."""
    between_prompts, between_raters, residual = variance_components(model)
    count = prompts * votes
    raters = min(raters, count)  # if there are more raters than votes, the others have none
    single = (between_prompts + between_raters + residual) / count
    by_prompt = between_prompts / prompts + (between_raters + residual) / count
    by_rater = between_raters / raters + (between_prompts + residual) / count
    variance = by_prompt + by_rater - single
    # Satterthwaite's approximation for the degrees of freedom, which `preference` also raises to at least 1
    spread = by_prompt**2 / (prompts - 1) + by_rater**2 / (raters - 1) - 2 * single**2 / count
    return variance, min(max(1.0, variance**2 / spread), count - 1)


def compute_power(model: VoteModel, raters: int, prompts: int, votes: int, margin: float) -> DesignPower:
    """Compute a design's power to detect a difference of `margin`, and to show equivalence within it."""
    from scipy.stats import nct  # takes half a second, which the other commands of a study need not wait for

    equal, different = model.with_preference(0.5), model.with_preference(0.5 + margin)
    variance, degrees = preference_variance(different, raters, prompts, votes)
    quantile = stdtrit(degrees, (1 + COVERAGE) / 2)
    noncentrality = margin / variance**0.5
    # The lower tail is computed as the upper tail of the mirrored distribution: nct.cdf is NaN for some large designs.
    difference = nct.sf(quantile, degrees, noncentrality) + nct.sf(quantile, degrees, -noncentrality)
    variance, degrees = preference_variance(equal, raters, prompts, votes)
    room = margin / variance**0.5 - stdtrit(degrees, COVERAGE)
    equivalence = max(0.0, 2 * stdtr(degrees, room) - 1)
    half = min(0.5, stdtrit(degrees, (1 + COVERAGE) / 2) * variance**0.5)  # shares are between 0 and 1
    return DesignPower(raters, prompts, prompts * votes / raters, float(half), float(difference), float(equivalence))


def power_table(config: PowerConfig, votes_per_item: int, margin: float) -> list[DesignPower]:
    """Compute the power for every combination of a number of raters and a number of prompts.

    If there are fewer raters than votes per item, each rater votes once on each item.

    Raises:
        RequestError: a standard deviation is above MAX_SD.
    """
    if max(config.prompt_sd, config.rater_sd) > MAX_SD:
        raise RequestError(
            f"power.prompt_sd and power.rater_sd must be at most {MAX_SD:g}. Power cannot be computed accurately "
            f"beyond that. Their defaults are typical values."
        )
    model = VoteModel(config.prompt_sd, config.rater_sd, ties=config.ties)
    return [
        compute_power(model, raters, prompts, min(votes_per_item, raters), margin)
        for raters in config.raters
        for prompts in config.prompts
    ]


def format_power(rows: list[DesignPower], margin: float, wanted: float) -> str:
    """Format the designs as a table, followed by the smallest designs whose power is at least `wanted`."""
    cells = [["raters", "prompts", "votes per rater", "half-width", "difference", "equivalence"]]
    for row in rows:
        votes = f"{row.votes_per_rater:.0f}" if row.votes_per_rater >= 1 else f"{row.votes_per_rater:.2g}"
        cells.append([str(row.raters), str(row.prompts), votes, f"{row.half_width:.3f}"])
        cells[-1] += [f"{row.difference:.0%}", f"{row.equivalence:.0%}"]
    purposes = {
        "difference": f"detect a preference of {_percent(0.5 + margin)}",
        "equivalence": f"show that equal models are between {_percent(0.5 - margin)} and {_percent(0.5 + margin)}",
    }
    conclusions = []
    for name, purpose in purposes.items():
        fewest_prompts: dict[int, int] = {}
        for row in rows:
            if getattr(row, name) >= wanted:
                fewest_prompts[row.raters] = min(row.prompts, fewest_prompts.get(row.raters, row.prompts))
        designs = ", ".join(f"{raters} raters × {prompts} prompts" for raters, prompts in fewest_prompts.items())
        purpose += f" with probability {_percent(wanted)}"
        conclusions.append(f"Sufficient to {purpose}: {designs or 'none of these'}.")
    return "\n".join([format_table(cells), "", *conclusions])


def _percent(share: float) -> str:
    """Format a share that the user chose, without rounding it to a whole percentage."""
    return f"{100 * share:.6g}%"
