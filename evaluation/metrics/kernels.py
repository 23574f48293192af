"""KID and CMMD: unbiased squared maximum mean discrepancies (Gretton et al., JMLR 13, 2012, equation 3).

    MMD²ᵤ = mean k(x, x′) + mean k(y, y′) − 2·mean k(x, y)

The first two means are over pairs of different samples. Pairs of generated samples must also have different prompts.

torch is imported inside the functions that need it, so that listing the metrics does not require this slow import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from evaluation.metrics.intervals import GROUPS, Estimate, Jackknife, groups_of, jackknife
from shards.base.device import best_device

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_ROWS = 1024
"""Number of rows of the kernel matrix computed at a time."""
CMMD_SIGMA, CMMD_SCALE = 10.0, 1000.0
"""Kernel bandwidth and scale factor of CMMD (Jayasumana et al., 2024)."""
ESTIMAND = "squared discrepancy between the model's distribution and the reference's"

Kernel = Callable[["Tensor", "Tensor"], "Tensor"]
"""Function from features (N, D) and (M, D) to their kernel matrix (N, M)."""


def cubic(x: Tensor, y: Tensor) -> Tensor:
    """Return KID's kernel, (x·y/D + 1)³ (Bińkowski et al., 2018)."""
    return (x @ y.T / x.shape[1] + 1) ** 3


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    """Return CMMD's kernel, exp(−|x − y|²/2σ²), over rows normalised to length 1."""
    import torch

    x, y = (torch.nn.functional.normalize(rows, dim=1) for rows in (x, y))
    return torch.exp((x @ y.T - 1) / CMMD_SIGMA**2)


@dataclass(frozen=True)
class KernelSums:
    """Sums of a kernel over pairs of samples, indexed by the two samples' groups."""

    values: np.ndarray
    """(G, G) sums."""
    pairs: np.ndarray
    """(G, G) pair counts."""

    def mean_without(self, left_out: tuple[int, ...]) -> float:
        """Return the mean over all pairs outside the groups `left_out`."""
        kept = np.setdiff1d(np.arange(len(self.values)), left_out)
        block = np.ix_(kept, kept)
        return float(self.values[block].sum() / self.pairs[block].sum())


def kid(features: np.ndarray, clusters: np.ndarray, reference: np.ndarray) -> Estimate:
    """Estimate the kernel Inception distance from all pairs. The usual random subsets give the same expected value."""
    return mmd(features, clusters, reference, cubic).interval(ESTIMAND)


def cmmd(features: np.ndarray, clusters: np.ndarray, reference: np.ndarray) -> Estimate:
    """Estimate CMMD times 1000, as in the paper, but with the unbiased estimator instead of the paper's biased one."""
    found = mmd(features, clusters, reference, gaussian).interval(ESTIMAND)
    value, low, high = (CMMD_SCALE * number for number in (found.value, found.low, found.high))
    return Estimate(value, low, high, found.estimand)


def mmd(features: np.ndarray, clusters: np.ndarray, reference: np.ndarray, kernel: Kernel) -> Jackknife:
    """Estimate MMD²ᵤ between samples and a reference, in float64.

    Prompts and reference images are divided into the same number of groups. The jackknife leaves out one group of each,
    or two, at a time.

    Args:
        features: (N, D) features of the samples.
        clusters: (N,) prompt ids of the samples.
        reference: (M, D) features of the reference.
    """
    images = np.arange(len(reference))
    groups, reference_groups = groups_of(clusters), groups_of(images)
    within_samples = kernel_sums(kernel, features, groups, features, groups, clusters)
    within_reference = kernel_sums(kernel, reference, reference_groups, reference, reference_groups, images)
    between = kernel_sums(kernel, features, groups, reference, reference_groups)
    terms = ((within_samples, 1), (within_reference, 1), (between, -2))
    return jackknife(lambda left_out: sum(weight * sums.mean_without(left_out) for sums, weight in terms))


def kernel_sums(
    kernel: Kernel,
    x: np.ndarray,
    x_groups: np.ndarray,
    y: np.ndarray,
    y_groups: np.ndarray,
    clusters: np.ndarray | None = None,
) -> KernelSums:
    """Sum a kernel over all pairs of rows from `x`, (N, D), and `y`, (M, D), separately for each pair of groups.

    If `y` is `x`, pass the rows' `clusters`, (N,), to exclude pairs within the same cluster.
    """
    import torch

    device = best_device()
    one_hot = torch.nn.functional.one_hot
    columns = torch.from_numpy(y.astype(np.float64)).to(device)
    column_groups = one_hot(torch.from_numpy(y_groups).long(), GROUPS).double().to(device)
    values, pairs = torch.zeros(2, GROUPS, GROUPS, dtype=torch.float64, device=device)
    for start in range(0, len(x), BLOCK_ROWS):
        chosen = slice(start, start + BLOCK_ROWS)
        block = kernel(torch.from_numpy(x[chosen].astype(np.float64)).to(device), columns)
        counted = torch.ones_like(block)
        if clusters is not None:
            counted = torch.from_numpy(clusters[chosen, None] != clusters[None]).to(block)
        row_groups = one_hot(torch.from_numpy(x_groups[chosen]).long(), GROUPS).double().to(device)
        values += row_groups.T @ (block * counted) @ column_groups
        pairs += row_groups.T @ counted @ column_groups
    return KernelSums(values.cpu().numpy(), pairs.cpu().numpy())
