"""Fréchet distances between Gaussians fitted to features: FID, CLIP-FID or FD-DINOv2, depending on the extractor.

    d²(N(m₁, C₁), N(m₂, C₂)) = |m₁ − m₂|² + tr(C₁) + tr(C₂) − 2·tr((C₂^½·C₁·C₂^½)^½)      (Dowson and Landau, 1982)

With N samples, the distance has an upward bias of roughly c/N for a constant c (Chong and Forsyth, 2020). For two
samples from the same white Gaussian in d dimensions, the bias is (2d + d(d + 1)/2)/N.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from evaluation.metrics.intervals import GROUPS, Estimate, groups_of, jackknife
from shards.base.errors import RequestError

MAX_LEFT_OUT = 2
"""Maximum number of groups that the jackknife leaves out at a time."""


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of a Gaussian."""

    mean: np.ndarray
    """(D,) float64."""
    covariance: np.ndarray
    """(D, D) float64."""

    @classmethod
    def of(cls, features: np.ndarray) -> "Moments":
        """Compute the mean and the unbiased covariance of (N, D) features."""
        features = features.astype(np.float64)
        return cls(features.mean(0), np.atleast_2d(np.cov(features, rowvar=False)))

    @cached_property
    def root(self) -> np.ndarray:
        """Symmetric square root of the covariance, (D, D)."""
        values, vectors = np.linalg.eigh(self.covariance)
        root: np.ndarray = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
        return root


def frechet_distance(first: Moments, second: Moments) -> float:
    """Return d² between two Gaussians. It is exact even if a covariance is singular."""
    product = second.root @ first.covariance @ second.root
    trace = np.sqrt(np.maximum(np.linalg.eigvalsh(product), 0)).sum()
    gap = first.mean - second.mean
    distance = gap @ gap + np.trace(first.covariance) + np.trace(second.covariance) - 2 * trace
    return max(0.0, float(distance))  # rounding may leave a tiny negative number


class GroupSums:
    """Counts, sums and products of features per group, from which moments with some groups left out are computed."""

    def __init__(self, features: np.ndarray, groups: np.ndarray):
        """Sum (N, D) features by their (N,) groups."""
        features = features.astype(np.float64)
        self.origin = features.mean(0)  # subtracted first, because sums of squares of large values lose precision
        parts = [features[groups == group] - self.origin for group in range(GROUPS)]
        self.counts = np.array([len(part) for part in parts])
        self.sums = np.stack([part.sum(0) for part in parts])
        self.products = np.stack([part.T @ part for part in parts])
        self.all_products = self.products.sum(0)

    def without(self, left_out: tuple[int, ...]) -> Moments:
        """Return the moments of all samples outside the groups `left_out`."""
        gone = list(left_out)
        count = self.counts.sum() - self.counts[gone].sum()
        mean = (self.sums.sum(0) - self.sums[gone].sum(0)) / count
        products = self.all_products - self.products[gone].sum(0)
        return Moments(mean + self.origin, (products - count * np.outer(mean, mean)) / (count - 1))


def frechet_at_n(features: np.ndarray, clusters: np.ndarray, reference: Moments) -> Estimate:
    """Estimate the distance between N samples and a reference, without correcting the estimate's upward bias.

    Args:
        features: (N, D) features of the samples.
        clusters: (N,) prompt ids of the samples.

    Raises:
        RequestError: there are too few samples for a nonsingular covariance.
    """
    check_enough(clusters, features.shape[1])
    sums = GroupSums(features, groups_of(clusters))
    jack = jackknife(lambda left_out: frechet_distance(sums.without(left_out), reference))
    return jack.interval(f"mean over draws of {len(features)} samples, against this reference")


def frechet_infinity(features: np.ndarray, clusters: np.ndarray, reference: np.ndarray) -> Estimate:
    """Estimate the distance that samples and a reference would have with infinitely many images on both sides.

    Prompts and reference images are divided into the same number of groups. The jackknife leaves out one group of each,
    or two, at a time.

    Args:
        features: (N, D) features of the samples.
        clusters: (N,) prompt ids of the samples.
        reference: (M, D) features of the reference.

    Raises:
        RequestError: either side has too few samples for a nonsingular covariance.
    """
    check_enough(clusters, features.shape[1])
    reference_clusters = np.arange(len(reference))
    check_enough(reference_clusters, reference.shape[1], "the reference")
    sums = GroupSums(features, groups_of(clusters))
    reference_sums = GroupSums(reference, groups_of(reference_clusters))
    jack = jackknife(lambda left_out: frechet_distance(sums.without(left_out), reference_sums.without(left_out)))
    return jack.interval("distance between the model's distribution and the reference's", unbiased=True)


def check_enough(clusters: np.ndarray, dimensions: int, source: str = "the sample set") -> None:
    """Check that the covariance of features stays nonsingular when the jackknife leaves out the largest groups.

    Args:
        clusters: (N,) ids of the features' clusters, such as prompt ids.
        dimensions: number of components of a feature.

    Raises:
        RequestError: there are too few samples.
    """
    count, needed = len(clusters), dimensions + 1
    left = int(np.sort(np.bincount(groups_of(clusters)))[:-MAX_LEFT_OUT].sum())
    if left < needed:
        raise RequestError(
            f"A Fréchet distance over {dimensions}-dimensional features needs at least {needed} images outside the "
            f"{MAX_LEFT_OUT} largest of {GROUPS} groups, which are left out to compute its interval, but {source} has "
            f"only {left} of its {count} images there. With fewer images, the covariance is singular, and the distance "
            f"depends more on the number of images than on the model. Use about {-(-count * needed // max(left, 1))} "
            f"images or more, or choose kid or cmmd, which have no such minimum."
        )
