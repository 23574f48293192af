"""Simulated studies: raters and prompts with leanings of their own, whose true preference is known.

A rater r leans to the first model on prompt p by d = mean + aₚ + bᵣ, in log odds; a and b are normal. Of what is added
to d at each vote the distribution is logistic, and a vote with |d + noise| below a threshold is a tie.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit

from evaluate.study.schedule import deal

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


@dataclass(frozen=True)
class Design:
    """Which rater votes on which prompt: (N,) each."""

    prompts: np.ndarray
    raters: np.ndarray

    @classmethod
    def make(cls, num_prompts: int, num_raters: int, votes: int, seed: int = 0) -> "Design":
        """As the schedule deals items to raters."""
        dealt = deal(np.random.default_rng(seed).random((num_prompts, num_raters)), votes)
        return cls(np.repeat(np.arange(num_prompts), votes), dealt.ravel())


def simulate(leanings: Leanings, design: Design, count: int, rng: np.random.Generator) -> np.ndarray:
    """(count, N) scores of as many studies, each with prompts and raters of its own."""
    a = rng.normal(scale=leanings.prompt_sd, size=(count, design.prompts.max() + 1))
    b = rng.normal(scale=leanings.rater_sd, size=(count, design.raters.max() + 1))
    felt = leanings.mean + a[:, design.prompts] + b[:, design.raters]
    felt += rng.logistic(size=felt.shape)
    threshold = leanings.threshold
    return np.where(np.abs(felt) < threshold, 0.5, (felt > 0).astype(float))


def share_of(
    test: Callable[[np.ndarray], np.ndarray],
    leanings: Leanings,
    design: Design,
    draws: int,
    seed: int,
    batch: int = 500,
) -> float:
    """Of how many simulated studies `test` ((count, N) scores → (count,)) is true."""
    rng = np.random.default_rng(seed)
    counts = [min(batch, draws - start) for start in range(0, draws, batch)]
    return float(sum(test(simulate(leanings, design, count, rng)).sum() for count in counts) / draws)
