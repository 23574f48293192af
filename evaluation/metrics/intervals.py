"""Confidence intervals for metrics. Bias and variance are estimated from a metric's values with some samples left out.

Samples are left out in groups of whole prompts, because images of the same prompt are not independent. The variance
estimator is from Efron and Stein ("The jackknife estimate of variance", Annals of Statistics 9, 1981, section 5). It
corrects the plain jackknife, which counts second-order terms twice. The correction matters most if two distributions
are nearly equal, because then only second-order terms remain.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.special import stdtrit  # quantile of Student's t distribution; scipy.stats is slow to import

GROUPS = 12
"""Number of groups into which samples are divided."""
MIN_CLUSTERS = 2 * GROUPS
"""Minimum number of prompts, or of images in a reference: two per group. With fewer, intervals are too narrow."""
COVERAGE = 0.95
MIN_SHARE = 0.6
"""Lower bound on the corrected variance, as a fraction of the plain jackknife's variance. In theory, one half would
suffice, because the plain variance counts the second-order part twice. With only 12 groups, however, both parts are
noisy. `python -m bench.intervals` measures the effect of this bound."""
MIN_DEVIATIONS = 4.0
"""Lower bound on the distance that determines an interval's width, in standard deviations (`Jackknife.interval`)."""

Statistic = Callable[[tuple[int, ...]], float]
"""Function from the groups to leave out to the statistic's value over all other groups."""


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float
    estimand: str
    """Quantity that the interval covers."""


@dataclass(frozen=True)
class Jackknife:
    """Value, bias and variance of a statistic."""

    value: float
    """Value over all samples."""
    unbiased: float
    """Value without its 1/N bias."""
    variance: float
    linear: float
    """Part of the variance that is due to first-order terms."""

    def interval(self, estimand: str, unbiased: bool = False) -> Estimate:
        """Return the 95 % interval for a squared distance, based on Student's t distribution over the groups.

        The first-order part of a squared distance's variance is proportional to the distance. As in the Wilson interval
        for a proportion, the interval therefore contains every θ whose variance is large enough to produce this value:

            (θ − value)² ≤ t²·(variance + slope·(θ − value)),    slope = linear / distance

        where the distance is taken to be at least `MIN_DEVIATIONS` standard deviations, in case it cannot be
        distinguished from 0.

        A distance is never negative, so the interval is truncated at 0. An unbiased estimate can be negative; if the
        distributions are equal, about half of all estimates are negative. A negative estimate gets the interval for an
        estimate of 0. That interval contains the whole non-negative part of the untruncated interval, so it covers the
        true distance at least as often. With `unbiased`, the estimate is the unbiased value instead of the value over
        all samples.
        """
        value = self.unbiased if unbiased else self.value
        t2 = stdtrit(GROUPS - 1, (1 + COVERAGE) / 2) ** 2
        distance = max(self.unbiased, MIN_DEVIATIONS * self.variance**0.5)
        middle = t2 * self.linear / distance / 2 if distance > 0 else 0.0
        half = (middle**2 + t2 * self.variance) ** 0.5
        center = max(value, 0.0) + middle
        return Estimate(value, max(center - half, 0.0), center + half, estimand)


def jackknife(statistic: Statistic) -> Jackknife:
    """Estimate bias and variance by leaving out each group, and each pair of groups.

    For G groups, the statistic is computed 1 + G + G(G − 1)/2 times. Let S be its value over all samples, S₍ᵢ₎ without
    group i, and S₍ᵢⱼ₎ without groups i and j:

        unbiased   G·S − (G − 1)·mean S₍ᵢ₎                                     (without a 1/N term)
        variance   (G − 1)/G·Σᵢ(S₍ᵢ₎ − mean)² − 1/(G(G − 1))·Σᵢ﹤ⱼ(Qᵢⱼ − mean Q)²
        linear     the variance, minus its second term once more
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
    variance = max(first - second, MIN_SHARE * first)
    return Jackknife(whole, count * whole - (count - 1) * without.mean(), variance, max(0.0, first - 2 * second))


def groups_of(clusters: np.ndarray) -> np.ndarray:
    """Assign whole clusters, such as prompts, to groups at random and evenly: (N,) cluster ids → (N,) groups.

    Round-robin assignment would not work if different kinds of prompts alternate in the prompt file: each kind would
    get its own groups, and the groups would differ too much. The assignment depends only on the number of clusters and
    their order.
    """
    _, first, inverse = np.unique(clusters, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))  # position of each cluster by first appearance
    group_of_rank = np.random.default_rng(len(first)).permutation(len(first)) % GROUPS
    groups: np.ndarray = group_of_rank[rank[inverse]]
    return groups


def mean_interval(
    values: np.ndarray, clusters: np.ndarray, estimand: str, lowest: float = -math.inf, highest: float = math.inf
) -> Estimate:
    """Estimate the mean of values in clusters.

    The interval is based on the linearised variance of the ratio estimator, and is clipped to the range of possible
    values, `lowest` to `highest`.

    Args:
        values: (N,) values.
        clusters: (N,) ids of the values' clusters, such as prompt ids.
    """
    _, inverse = np.unique(clusters, return_inverse=True)
    sizes = np.bincount(inverse)
    mean = float(values.mean())
    residuals = np.bincount(inverse, weights=values) - mean * sizes
    count = len(sizes)
    variance = count / (count - 1) * (residuals**2).sum() / sizes.sum() ** 2
    half = float(stdtrit(count - 1, (1 + COVERAGE) / 2) * variance**0.5)
    return Estimate(mean, max(mean - half, lowest), min(mean + half, highest), estimand)


def share_interval(hits: np.ndarray, clusters: np.ndarray, estimand: str) -> Estimate:
    """Estimate the share of samples that are hits.

    The interval is the Wilson interval at the effective sample size: the number of independent samples for which the
    share would have the same variance.

    Args:
        hits: (N,) bool.
        clusters: (N,) ids of the samples' clusters, such as prompt ids.
    """
    share = float(hits.mean())
    plain = mean_interval(hits.astype(np.float64), clusters, estimand)
    count = len(np.unique(clusters))
    quantile = float(stdtrit(count - 1, (1 + COVERAGE) / 2))
    variance = ((plain.high - plain.low) / 2 / quantile) ** 2
    effective = min(len(hits), share * (1 - share) / variance) if variance else count
    low, high = wilson(share, effective, quantile)
    return Estimate(share, low, high, estimand)


def wilson(share: float, count: float, quantile: float) -> tuple[float, float]:
    """Return the Wilson interval (1927), which is within [0, 1] and contains p, for a share p of n independent samples
    at quantile q.

    (p + q²/2n ± q·√(p(1 − p)/n + q²/4n²)) / (1 + q²/n)
    """
    q2 = quantile**2 / count
    middle, half = share + q2 / 2, math.sqrt(q2 * (share * (1 - share) + q2 / 4))
    low, high = (middle - half) / (1 + q2), (middle + half) / (1 + q2)
    # rounding may leave [0, 1] or exclude a share of 0 or 1
    return max(0.0, min(low, share)), min(1.0, max(high, share))
