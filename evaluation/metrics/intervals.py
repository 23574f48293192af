"""A statistic's bias and variance from what it is without some of its samples.

Samples are left out by groups, each of whole prompts: pictures of one prompt depend on each other. The variance is
Efron and Stein's ("The jackknife estimate of variance", Annals of Statistics 9, 1981, section 5), which takes from the
jackknife's what second-order terms put into it twice. Near equality of two distributions these terms are all there is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy.stats import t

GROUPS = 12
LEAST_CLUSTERS = 2 * GROUPS
"""Prompts, or pictures of a reference, below which a group has one alone: intervals are too narrow then."""
COVERAGE = 0.95
LEAST_SHARE = 0.6
"""Of the plain jackknife's variance that is kept: a half would do (it holds the second-order part twice), but that both
are noisy over 12 groups. `python -m bench.outputs.intervals` shows what it is good for."""
LEAST_DEVIATIONS = 4.0

Statistic = Callable[[tuple[int, ...]], float]
"""Groups that are left out → its value over the others."""


@dataclass(frozen=True)
class Estimate:
    """A number, and how sure it is."""

    value: float
    low: float
    high: float
    """Of a 95 % interval."""
    estimand: str
    """What the interval covers."""


@dataclass(frozen=True)
class Jackknife:
    """What a statistic is over all samples, without its 1/N bias, and how it varies."""

    value: float
    unbiased: float
    variance: float
    linear: float
    """Of the variance, what first-order terms make."""

    def interval(self, estimand: str, unbiased: bool = False) -> Estimate:
        """By Student's t over the groups, of a squared distance: the first-order part of its variance is proportional
        to it. So, as Wilson's of a share, the interval is of all θ that would vary enough to give this value:

            (θ − value)² ≤ t²·(variance + slope·(θ − value)),    slope = linear / distance

        A distance that is not seen to differ from 0 counts as `LEAST_DEVIATIONS` standard deviations.

        No distance is below 0, so neither is the interval. An unbiased estimate can be: over equal distributions it is
        so in about half of all draws. Its interval is then that of an estimate of 0, which contains all of the
        unrestricted interval that is possible, so it covers the true distance at least as often.
        """
        value = self.unbiased if unbiased else self.value
        t2 = t.ppf((1 + COVERAGE) / 2, GROUPS - 1) ** 2
        distance = max(self.unbiased, LEAST_DEVIATIONS * self.variance**0.5)
        middle = t2 * self.linear / distance / 2 if distance > 0 else 0.0
        half = (middle**2 + t2 * self.variance) ** 0.5
        center = max(value, 0.0) + middle
        return Estimate(value, max(center - half, 0.0), center + half, estimand)


def jackknife(statistic: Statistic) -> Jackknife:
    """Leave out each group, and each pair of groups: 1 + G + G(G − 1)/2 values of the statistic.

    With S₍ᵢ₎ and S₍ᵢⱼ₎ for these,

        unbiased   G·S − (G − 1)·mean S₍ᵢ₎                                     (no 1/N term is left)
        variance   (G − 1)/G·Σᵢ(S₍ᵢ₎ − mean)² − 1/(G(G − 1))·Σᵢ﹤ⱼ(Qᵢⱼ − mean Q)²    (linear part: less twice it)
        Qᵢⱼ        G·S − (G − 1)·(S₍ᵢ₎ + S₍ⱼ₎) + (G − 2)·S₍ᵢⱼ₎
    """
    count = GROUPS
    whole = statistic(())
    without = np.array([statistic((i,)) for i in range(count)])
    pairs = np.array(
        [
            count * whole - (count - 1) * (without[i] + without[j]) + (count - 2) * statistic((i, j))
            for i, j in combinations(range(count), 2)
        ]
    )
    first = (count - 1) / count * ((without - without.mean()) ** 2).sum()
    second = ((pairs - pairs.mean()) ** 2).sum() / (count * (count - 1))
    variance = max(first - second, LEAST_SHARE * first)
    return Jackknife(whole, count * whole - (count - 1) * without.mean(), variance, max(0.0, first - 2 * second))


def groups_of(clusters: np.ndarray, num_groups: int = GROUPS) -> np.ndarray:
    """(N,) ids of clusters, such as prompts → (N,) group of each sample; clusters are dealt out evenly, at random.

    In turn, kinds of prompts that take turns in a file would each have a group, and these would differ too much.
    """
    _, first, inverse = np.unique(clusters, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))  # clusters by their first appearance
    dealt = np.random.default_rng(len(first)).permutation(len(first)) % num_groups
    groups: np.ndarray = dealt[rank[inverse]]
    return groups


def mean_interval(values: np.ndarray, clusters: np.ndarray, estimand: str) -> Estimate:
    """A mean over samples, clustered: the ratio of the clusters' sums to their sizes, and its linearised variance."""
    _, inverse = np.unique(clusters, return_inverse=True)
    sizes = np.bincount(inverse)
    mean = float(values.mean())
    residuals = np.bincount(inverse, weights=values) - mean * sizes
    count = len(sizes)
    variance = count / (count - 1) * (residuals**2).sum() / sizes.sum() ** 2
    half = float(t.ppf((1 + COVERAGE) / 2, count - 1) * variance**0.5)
    return Estimate(mean, mean - half, mean + half, estimand)


def share_interval(hits: np.ndarray, clusters: np.ndarray, estimand: str) -> Estimate:
    """A share of samples: Wilson's interval for as many independent samples as would vary as these, clustered, do."""
    share = float(hits.mean())
    plain = mean_interval(hits.astype(np.float64), clusters, estimand)
    count = len(np.unique(clusters))
    z = t.ppf((1 + COVERAGE) / 2, count - 1)
    variance = ((plain.high - plain.low) / 2 / z) ** 2
    effective = min(len(hits), share * (1 - share) / variance) if variance else count
    low, high = wilson(share, effective, z)
    return Estimate(share, float(low), float(high), estimand)


def wilson(share: Any, count: Any, quantile: Any) -> tuple[Any, Any]:
    """Wilson's interval (1927) of a share p of n independent samples, at the quantile q: it stays within [0, 1].

    (p + q²/2n ± q·√(p(1 − p)/n + q²/4n²)) / (1 + q²/n)
    """
    q2 = quantile**2 / count
    middle, half = share + q2 / 2, np.sqrt(q2 * (share * (1 - share) + q2 / 4))
    return (middle - half) / (1 + q2), (middle + half) / (1 + q2)
