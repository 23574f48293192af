"""Fréchet distances of Gaussians fitted to features: FID, CLIP-FID and FD-DINOv2 by the extractor.

    d²(N(m₁, C₁), N(m₂, C₂)) = |m₁ − m₂|² + tr(C₁) + tr(C₂) − 2·tr((C₂^½·C₁·C₂^½)^½)      (Dowson and Landau, 1982)

Over N samples it is too large by about a constant/N (Chong and Forsyth, 2020): (2d + d(d + 1)/2)/N for two samples of
one white Gaussian.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from evaluation.metrics.intervals import GROUPS, Estimate, groups_of, jackknife
from shards.base.errors import RequestError

LEFT_OUT = 2
"""Groups at a time."""


@dataclass(frozen=True)
class Moments:
    """A Gaussian."""

    mean: np.ndarray
    """(D,) float64."""
    covariance: np.ndarray
    """(D, D) float64."""

    @classmethod
    def of(cls, features: np.ndarray) -> "Moments":
        """Mean and unbiased covariance of (N, D) features."""
        features = features.astype(np.float64)
        return cls(features.mean(0), np.atleast_2d(np.cov(features, rowvar=False)))

    @cached_property
    def root(self) -> np.ndarray:
        """(D, D) symmetric square root of the covariance."""
        values, vectors = np.linalg.eigh(self.covariance)
        root: np.ndarray = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
        return root


def frechet_distance(first: Moments, second: Moments) -> float:
    """d² of two Gaussians; exact for singular covariances, too."""
    product = second.root @ first.covariance @ second.root
    trace = np.sqrt(np.maximum(np.linalg.eigvalsh(product), 0)).sum()
    gap = first.mean - second.mean
    return float(gap @ gap + np.trace(first.covariance) + np.trace(second.covariance) - 2 * trace)


class GroupSums:
    """Counts, sums and products of features by group, from which the moments without some groups follow."""

    def __init__(self, features: np.ndarray, groups: np.ndarray):
        """`features`: (N, D); `groups`: (N,)."""
        features = features.astype(np.float64)
        self.origin = features.mean(0)  # sums of squares far from it would lose digits
        parts = [features[groups == group] - self.origin for group in range(GROUPS)]
        self.counts = np.array([len(part) for part in parts])
        self.sums = np.stack([part.sum(0) for part in parts])
        self.products = np.stack([part.T @ part for part in parts])
        self.all_products = self.products.sum(0)

    def without(self, left_out: tuple[int, ...]) -> Moments:
        """Of the other groups' samples."""
        gone = list(left_out)
        count = self.counts.sum() - self.counts[gone].sum()
        mean = (self.sums.sum(0) - self.sums[gone].sum(0)) / count
        products = self.all_products - self.products[gone].sum(0)
        return Moments(mean + self.origin, (products - count * np.outer(mean, mean)) / (count - 1))


def frechet_at_n(features: np.ndarray, clusters: np.ndarray, reference: Moments) -> Estimate:
    """The distance of (N, D) features from a fixed reference.

    Raises:
        RequestError: fewer samples than the covariance needs.
    """
    check_enough(features)
    sums = GroupSums(features, groups_of(clusters))
    jack = jackknife(lambda left_out: frechet_distance(sums.without(left_out), reference))
    return jack.interval(f"mean over draws of {len(features)} samples, against this reference")


def frechet_infinity(features: np.ndarray, clusters: np.ndarray, reference: np.ndarray) -> Estimate:
    """The distance at infinitely many samples of both sides; group i of both is left out together.

    Raises:
        RequestError: fewer samples than a covariance needs, on either side.
    """
    check_enough(features)
    check_enough(reference, "in the reference")
    sums = GroupSums(features, groups_of(clusters))
    theirs = GroupSums(reference, groups_of(np.arange(len(reference))))
    jack = jackknife(lambda left_out: frechet_distance(sums.without(left_out), theirs.without(left_out)))
    return jack.interval("distance between all that the model draws and all that the reference is drawn from", True)


def check_enough(features: np.ndarray, where: str = "drawn") -> None:
    """Refuse a covariance of more dimensions than samples, when the groups that the interval leaves out are gone.

    Raises:
        RequestError: there are fewer.
    """
    count, dimensions = features.shape
    needed = -(-(dimensions + 1) * GROUPS // (GROUPS - LEFT_OUT))
    if count < needed:
        raise RequestError(
            f"A Fréchet distance over features of {dimensions} dimensions needs {needed} pictures or more, and there "
            f"are {count} {where}: below that the covariance is singular, and the number says more of N than of the "
            f"model. Take more, or kid or cmmd, which have no such bound."
        )
