"""The share of votes for one of two models, ties counting as halves, with an interval over prompts and raters.

Votes on the same prompt are correlated, and so are votes by the same rater. Prompts and raters are therefore treated as
crossed clusters (Cameron, Gelbach and Miller, "Robust inference with multiway clustering", Journal of Business &
Economic Statistics 29, 2011, section 2.2). docs/evidence/intervals.md lists the measured coverage.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from evaluation.metrics.intervals import COVERAGE, wilson

TINY = 1e-12


@dataclass(frozen=True)
class Preference:
    """A preference and its uncertainty."""

    value: float
    """Share of votes for the first model, ties counting as halves."""
    variance: float
    degrees: float
    """Degrees of freedom of the variance, at least 1."""
    effective: float
    """Number of independent votes that would give the same variance."""

    def interval(self, coverage: float = COVERAGE) -> tuple[float, float]:
        """Return the Wilson interval at the effective number of votes, with a quantile of Student's t distribution."""
        return wilson(self.value, self.effective, float(stdtrit(self.degrees, (1 + coverage) / 2)))

    def is_within(self, margin: float) -> bool:
        """Test whether the preference is within `margin` of one half, by two one-sided tests (Schuirmann, 1987).

        Both tests reject at level 1 − COVERAGE if the interval of coverage 2·COVERAGE − 1 lies within the margin.
        """
        low, high = self.interval(2 * COVERAGE - 1)
        return low > 0.5 - margin and high < 0.5 + margin


def preference(scores: np.ndarray, prompts: np.ndarray, raters: np.ndarray) -> Preference:
    """Estimate the preference for the first model.

    Let e be the scores minus their mean, T the sum of e over a cluster, n the number of votes in the cluster, and m the
    mean of e·e' over pairs of votes that share neither prompt nor rater. Because the mean is itself estimated, the
    variance would be too small; subtracting m removes this bias.

        V(clusters)   Σ(T² − n²·m) / N²
        variance      V(prompts) + V(raters) − V(prompt and rater),   at least V(prompt and rater)
        degrees       variance² / (Σ V(clusters)²/(G − 1) − 2·V(prompt and rater)²/G),       G = N² / Σn²

    The degrees of freedom are Satterthwaite's, without the contribution of the votes' own squares, because
    (vote − mean)² hardly varies. When the variance is at its lower bound, it consists of these squares alone, and the
    degrees of freedom are G(prompt and rater) − 1.

    Args:
        scores: (N,) scores: 1 for the first model, 0 for the second, 0.5 for a tie.
        prompts: (N,) prompt ids of any type.
        raters: (N,) rater ids of any type.

    Returns:
        The preference. If no two votes differ in both prompt and rater, the effective number of votes is practically 0
        and every interval is [0, 1].
    """
    count, value = len(scores), float(scores.mean())
    _, prompt_of = np.unique(prompts, return_inverse=True)
    _, rater_of = np.unique(raters, return_inverse=True)
    both = prompt_of * (rater_of.max() + 1) + rater_of
    e = scores - value
    squares, sizes = zip(*(_cluster_squares(e, labels) for labels in (prompt_of, rater_of, both)), strict=True)
    unrelated_pairs = count**2 - sizes[0] - sizes[1] + sizes[2]
    if not unrelated_pairs:  # one rater or one prompt says nothing about how others would have voted
        return Preference(value, math.inf, 1.0, TINY)
    m = (squares[2] - squares[0] - squares[1]) / unrelated_pairs
    parts = [(square - size * m) / count**2 for square, size in zip(squares, sizes, strict=True)]
    groups = [count**2 / size for size in sizes]
    variance, lower_bound = parts[0] + parts[1] - parts[2], parts[2]
    if variance <= lower_bound:
        variance, spread = lower_bound, lower_bound**2 / (groups[2] - 1)
    else:
        spread = sum(part**2 / (group - 1) for part, group in zip(parts[:2], groups[:2], strict=True))
        spread -= 2 * lower_bound**2 / groups[2]
    if variance <= 0:  # the votes are unanimous
        fewest = min(groups[:2])
        return Preference(value, 0.0, max(1.0, fewest - 1), fewest)
    degrees, effective = max(1.0, variance**2 / spread), max(value * (1 - value), TINY) / variance
    return Preference(value, float(variance), float(degrees), float(effective))


def _cluster_squares(e: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Sum `e`, (N,), within each of the clusters given by (N,) `labels`, and square the sums.

    Returns:
        The sum of the squares, and the sum of the squared cluster sizes.
    """
    sums, sizes = np.bincount(labels, weights=e), np.bincount(labels).astype(float)
    return (sums**2).sum(), float((sizes**2).sum())
