"""Raters and prompts with leanings of their own, and the preference that comes of them.

A rater r leans to the first model on prompt p by d = mean + aₚ + bᵣ, in log odds; a and b are normal. Of what is added
to d at each vote the distribution is logistic, and a vote with |d + noise| below a threshold is a tie.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(64)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


@dataclass(frozen=True)
class Leanings:
    """Of a population of prompts and raters."""

    prompt_sd: float
    rater_sd: float
    mean: float = 0.0
    ties: float = 0.0
    """Share of ties where nobody leans either way, mean 0."""

    @property
    def sd(self) -> float:
        """Of prompts and raters together."""
        return float(np.hypot(self.prompt_sd, self.rater_sd))

    @property
    def threshold(self) -> float:
        """Below which a vote is a tie."""
        if not self.ties:
            return 0.0
        return float(brentq(lambda x: tied(NODES * self.sd, x) @ WEIGHTS - self.ties, 0.0, 50.0 + 10 * self.sd))

    @property
    def preference(self) -> float:
        """The share of votes for the first model, ties as halves: over all prompts and raters."""
        return float(expected(self.mean + NODES * self.sd, self.threshold) @ WEIGHTS)

    def at(self, preference: float) -> "Leanings":
        """The same with the mean at which the first model has that share."""

        def moved(mean: float) -> Leanings:
            return Leanings(self.prompt_sd, self.rater_sd, mean, self.ties)

        return moved(float(brentq(lambda mean: moved(mean).preference - preference, -50, 50)))


def expected(leaning: np.ndarray, threshold: float) -> np.ndarray:
    """What a vote is worth to the first model, on average."""
    found: np.ndarray = (expit(leaning - threshold) + expit(leaning + threshold)) / 2
    return found


def tied(leaning: np.ndarray, threshold: float) -> np.ndarray:
    """The probability of a tie."""
    found: np.ndarray = expit(leaning + threshold) - expit(leaning - threshold)
    return found
