"""A model of how raters vote on prompts, and the preference that results from it.

On prompt p, rater r favours the first model by d = mean + aₚ + bᵣ in log odds, where a and b are normal. Each vote adds
logistic noise to d, and is a tie if |d + noise| is below a threshold.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(64)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
"""Gauss-Hermite quadrature over a standard normal variable."""


@dataclass(frozen=True)
class VoteModel:
    """Distribution of votes over a population of prompts and raters."""

    prompt_sd: float
    """Standard deviation of aₚ."""
    rater_sd: float
    """Standard deviation of bᵣ."""
    mean: float = 0.0
    ties: float = 0.0
    """Share of ties if the models are equal (mean 0)."""

    @property
    def sd(self) -> float:
        """Standard deviation of aₚ + bᵣ."""
        return float(np.hypot(self.prompt_sd, self.rater_sd))

    @property
    def threshold(self) -> float:
        """Largest |d + noise| that counts as a tie, chosen so that `ties` is the share of ties."""
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
        """Return a copy whose mean is chosen such that the first model has this preference."""

        def shifted(mean: float) -> VoteModel:
            return VoteModel(self.prompt_sd, self.rater_sd, mean, self.ties)

        return shifted(float(brentq(lambda mean: shifted(mean).preference - preference, -50, 50)))


def expected_score(d: np.ndarray, threshold: float) -> np.ndarray:
    """Return the expected score of the first model for votes that favour it by `d`."""
    score: np.ndarray = (expit(d - threshold) + expit(d + threshold)) / 2
    return score


def tie_probability(d: np.ndarray, threshold: float) -> np.ndarray:
    """Return the probability of a tie for votes that favour the first model by `d`."""
    probability: np.ndarray = expit(d + threshold) - expit(d - threshold)
    return probability
