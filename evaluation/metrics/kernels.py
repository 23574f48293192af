"""Squared maximum mean discrepancies, unbiased (Gretton et al., JMLR 13, 2012, equation 3): KID and CMMD.

MMD²ᵤ = mean k(x, x′) + mean k(y, y′) − 2·mean k(x, y),   over pairs of different samples; of samples, of different
                                                         prompts
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evaluation.metrics.intervals import GROUPS, Estimate, Jackknife, groups_of, jackknife
from shards.base.device import best_device

ROWS = 1024
"""At a time."""
CMMD_SIGMA, CMMD_SCALE = 10.0, 1000.0
"""Jayasumana et al., 2024."""
ESTIMAND = "squared discrepancy between all that the model draws and all that the reference is drawn from"

Kernel = Callable[[Tensor, Tensor], Tensor]
"""(N, D), (M, D) → (N, M)."""


def cubic(x: Tensor, y: Tensor) -> Tensor:
    """(x·y/D + 1)³, KID's (Bińkowski et al., 2018)."""
    return (x @ y.T / x.shape[1] + 1) ** 3


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    """exp(−|x − y|²/2σ²) of rows scaled to length 1, CMMD's."""
    x, y = (torch.nn.functional.normalize(rows, dim=1) for rows in (x, y))
    return torch.exp((x @ y.T - 1) / CMMD_SIGMA**2)


@dataclass(frozen=True)
class Sums:
    """(G, G) sums of a kernel over pairs of samples by their groups, and how many pairs."""

    values: np.ndarray
    pairs: np.ndarray

    def mean_without(self, left_out: tuple[int, ...]) -> float:
        """Over the pairs of the other groups."""
        kept = np.setdiff1d(np.arange(len(self.values)), left_out)
        block = np.ix_(kept, kept)
        return float(self.values[block].sum() / self.pairs[block].sum())


def kid(features: np.ndarray, clusters: np.ndarray, reference: np.ndarray) -> Estimate:
    """Kernel Inception distance over all pairs; not the mean over subsets that others take, which has the same mean."""
    return mmd(features, clusters, reference, cubic).interval(ESTIMAND)


def cmmd(features: np.ndarray, clusters: np.ndarray, reference: np.ndarray) -> Estimate:
    """CMMD, times 1000 as its authors have it; theirs is the biased one."""
    found = mmd(features, clusters, reference, gaussian).interval(ESTIMAND)
    value, low, high = (CMMD_SCALE * number for number in (found.value, found.low, found.high))
    return Estimate(value, low, high, found.estimand)


def mmd(features: np.ndarray, clusters: np.ndarray, reference: np.ndarray, kernel: Kernel) -> Jackknife:
    """MMD²ᵤ of (N, D) and (M, D) features, in float64; group i of both is left out together."""
    own = np.arange(len(reference))
    groups, theirs = groups_of(clusters), groups_of(own)
    within = kernel_sums(features, groups, clusters, features, groups, clusters, kernel)
    without = kernel_sums(reference, theirs, own, reference, theirs, own, kernel)
    between = kernel_sums(features, groups, None, reference, theirs, None, kernel)
    sides = ((within, 1), (without, 1), (between, -2))
    return jackknife(lambda left_out: sum(weight * sums.mean_without(left_out) for sums, weight in sides))


def kernel_sums(
    x: np.ndarray,
    x_groups: np.ndarray,
    x_clusters: np.ndarray | None,
    y: np.ndarray,
    y_groups: np.ndarray,
    y_clusters: np.ndarray | None,
    kernel: Kernel,
) -> Sums:
    """Sums over all pairs, but for those of one cluster where clusters are given."""
    device = best_device()
    one_hot = torch.nn.functional.one_hot
    columns = torch.from_numpy(y.astype(np.float64)).to(device)
    of_column = one_hot(torch.from_numpy(y_groups).long(), GROUPS).double().to(device)
    values, pairs = torch.zeros(2, GROUPS, GROUPS, dtype=torch.float64, device=device)
    for start in range(0, len(x), ROWS):
        chosen = slice(start, start + ROWS)
        block = kernel(torch.from_numpy(x[chosen].astype(np.float64)).to(device), columns)
        counted = torch.ones_like(block)
        if x_clusters is not None and y_clusters is not None:
            counted = torch.from_numpy(x_clusters[chosen, None] != y_clusters[None]).to(block)
        of_row = one_hot(torch.from_numpy(x_groups[chosen]).long(), GROUPS).double().to(device)
        values += of_row.T @ (block * counted) @ of_column
        pairs += of_row.T @ counted @ of_column
    return Sums(values.cpu().numpy(), pairs.cpu().numpy())
