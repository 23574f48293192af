"""The share of votes for one of two models, ties as halves, with an interval over prompts and raters.

Votes of one prompt depend on each other, and so do those of one rater. Both are clusters, crossed: Cameron, Gelbach and
Miller, "Robust inference with multiway clustering", Journal of Business & Economic Statistics 29, 2011, section 2.2.
`python -m bench.outputs.study` shows how often the interval holds what it is said to hold.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import t

from evaluation.metrics.intervals import COVERAGE, wilson

NEXT_TO_NOTHING = 1e-12
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Preference:
    """What votes say. Every field is an array where several studies were given, (…,)."""

    value: Array
    """The share of votes, ties as halves."""
    variance: Array
    degrees: Array
    """Of freedom; not below 1."""
    effective: Array
    """As many independent votes would vary as much."""

    def interval(self, coverage: float = COVERAGE) -> tuple[Array, Array]:
        """Wilson's, at the effective number of votes and Student's quantile."""
        return wilson(self.value, self.effective, t.ppf((1 + coverage) / 2, self.degrees))

    def is_within(self, margin: float) -> np.ndarray:
        """Two one-sided tests (Schuirmann, 1987): whether the share is shown to be within `margin` of a half.

        Both reject at 1 − COVERAGE where the interval of 2·COVERAGE − 1 lies within the margin.
        """
        low, high = self.interval(2 * COVERAGE - 1)
        return np.asarray((low > 0.5 - margin) & (high < 0.5 + margin))


def preference(scores: np.ndarray, prompts: np.ndarray, raters: np.ndarray) -> Preference:
    """Of votes for the first model: 1, 0, or 0.5 for a tie.

    With e the scores less their mean, T the sums of e over a cluster and n its votes, and m the mean of e·e' over pairs
    of votes that share neither prompt nor rater (it takes the place of 0, by which the mean's own error would else make
    the variance too small),

        V(clusters)   Σ(T² − n²·m) / N²
        variance      V(prompts) + V(raters) − V(prompt and rater),   at least V(prompt and rater)
        degrees       variance² / (Σ V(clusters)²/(G − 1) − 2·V(prompt and rater)²/G),       G = N² / Σn²

    Degrees are Satterthwaite's, less what votes' own squares would add: (vote − mean)² hardly varies. Where the least
    variance is taken, nothing but these squares is in it, and degrees are G(prompt and rater) − 1.

    Args:
        scores: (…, N), of one study or of several of one design.
        prompts: (N,) any ids.
        raters: (N,) any ids.

    Returns:
        Where no two votes differ in both prompt and rater, the effective number of votes is as good as 0, and every
        interval is [0, 1].
    """
    count = scores.shape[-1]
    value = scores.mean(-1)
    _, prompt_of = np.unique(prompts, return_inverse=True)
    _, rater_of = np.unique(raters, return_inverse=True)
    both = prompt_of * (rater_of.max() + 1) + rater_of
    e = scores - value[..., None]
    squares, sizes = zip(*(_cluster_squares(e, labels) for labels in (prompt_of, rater_of, both)), strict=True)
    num_apart = count**2 - sizes[0] - sizes[1] + sizes[2]
    if not num_apart:  # one rater, or one prompt: nothing says how others would have voted
        nothing = np.zeros_like(value)
        return Preference(value, nothing + np.inf, nothing + 1, nothing + NEXT_TO_NOTHING)
    apart = (squares[2] - squares[0] - squares[1]) / num_apart
    parts = [(square - size * apart) / count**2 for square, size in zip(squares, sizes, strict=True)]
    groups = [count**2 / size for size in sizes]
    variance, least = parts[0] + parts[1] - parts[2], parts[2]
    at_least = variance <= least
    variance = np.where(at_least, least, variance)
    unanimous = variance <= 0
    variance = np.where(unanimous, np.nan, variance)
    spread = sum(part**2 / (group - 1) for part, group in zip(parts[:2], groups[:2], strict=True))
    spread = np.where(at_least, least**2 / (groups[2] - 1), spread - 2 * least**2 / groups[2])
    fewest = min(groups[:2])
    return Preference(
        value,
        np.where(unanimous, 0.0, variance),
        np.where(unanimous, fewest - 1, np.maximum(1.0, variance**2 / np.where(unanimous, 1.0, spread))),
        np.where(unanimous, fewest, np.maximum(value * (1 - value), NEXT_TO_NOTHING) / variance),
    )


def _cluster_squares(e: np.ndarray, labels: np.ndarray) -> tuple[Any, float]:
    """(…, N), (N,) → (…,) the sum of squared sums of clusters, and the sum of their squared sizes."""
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    sums = np.add.reduceat(e[..., order], starts, axis=-1)
    sizes = np.diff(np.append(starts, len(labels))).astype(float)
    return (sums**2).sum(-1), float((sizes**2).sum())
