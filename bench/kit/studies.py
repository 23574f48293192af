"""Simulated studies, whose true preference is known."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evaluation.study.schedule import deal
from evaluation.study.statistics.leanings import Leanings


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
