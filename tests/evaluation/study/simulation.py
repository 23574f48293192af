"""Simulated studies whose true preference is known."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evaluation.study.schedule import assign_raters
from evaluation.study.statistics.power import VoteModel


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


def share_of(
    test: Callable[[np.ndarray], np.ndarray],
    model: VoteModel,
    design: Design,
    draws: int,
    seed: int,
    batch: int = 500,
) -> float:
    """Return the share of simulated studies for which `test` ((count, N) scores → (count,)) is true."""
    rng = np.random.default_rng(seed)
    counts = [min(batch, draws - start) for start in range(0, draws, batch)]
    return float(sum(test(simulate(model, design, count, rng)).sum() for count in counts) / draws)
