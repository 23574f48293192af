"""Improved precision and recall (Kynkäänniemi et al., 2019): whose pictures lie near the others'.

A set's manifold is the union of balls about its points, each as wide as the way to its third nearest neighbour.
Precision is the share of the samples in the reference's manifold; recall that of the reference in the samples'.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from evaluation.metrics.intervals import Estimate, share_interval
from shards.base.device import best_device

NEIGHBOURS = 3
ROWS = 1024
"""At a time."""


def precision(features: np.ndarray, clusters: np.ndarray, reference: np.ndarray) -> Estimate:
    """The share of the (N, D) features that are in the manifold of the (M, D) reference."""
    return share_interval(
        covered(features, reference), clusters, "share of all that the model draws in this reference's manifold"
    )


def recall(features: np.ndarray, clusters: np.ndarray, reference: np.ndarray) -> Estimate:
    """The share of the (M, D) reference that is in the manifold of the (N, D) features."""
    own = np.arange(len(reference))
    estimand = "share of all that the reference is drawn from in these samples' manifold"
    return share_interval(covered(reference, features), own, estimand)


def covered(queries: np.ndarray, points: np.ndarray) -> np.ndarray:
    """(N,) whether each of the (N, D) queries lies in the ball of one of the (M, D) points."""
    device = best_device()
    origin = points.mean(0)  # distances stay, and digits with them
    x, y = (torch.from_numpy((rows - origin).astype(np.float64)).to(device) for rows in (queries, points))
    # itself is the nearest of them
    radii = torch.cat([distances.kthvalue(NEIGHBOURS + 1, dim=1).values for distances in _squared(y, y)])
    hits: np.ndarray = torch.cat([(distances <= radii).any(1) for distances in _squared(x, y)]).cpu().numpy()
    return hits


def _squared(rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
    """(ROWS, M) squared distances of some rows from all columns, block by block."""
    lengths = (columns**2).sum(1)
    for block in rows.split(ROWS):
        yield ((block**2).sum(1, keepdim=True) + lengths - 2 * block @ columns.T).clamp_min(0)
