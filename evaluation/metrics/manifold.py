"""Improved precision and recall (Kynkäänniemi et al., 2019).

The manifold of a set of features is a union of balls. Each ball is centred on one point and reaches to that point's
third nearest neighbour. Precision is the share of samples inside the reference's manifold. Recall is the share of
reference images inside the samples' manifold.

torch is imported inside the function that needs it, so that listing the metrics does not require this slow import.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from evaluation.metrics.intervals import Estimate, share_interval
from shards.base.device import best_device

if TYPE_CHECKING:
    from torch import Tensor

NEIGHBOURS = 3
BLOCK_ROWS = 1024
"""Number of rows of the distance matrix computed at a time."""


def precision(features: np.ndarray, clusters: np.ndarray, reference: np.ndarray) -> Estimate:
    """Estimate the share of (N, D) features inside the manifold of the (M, D) reference."""
    estimand = "share of the model's distribution inside this reference's manifold"
    return share_interval(covered(features, reference), clusters, estimand)


def recall(features: np.ndarray, clusters: np.ndarray, reference: np.ndarray) -> Estimate:
    """Estimate the share of the (M, D) reference inside the manifold of the (N, D) features."""
    estimand = "share of the reference's distribution inside these samples' manifold"
    return share_interval(covered(reference, features), np.arange(len(reference)), estimand)


def covered(queries: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return whether each of the (N, D) queries is inside the manifold of the (M, D) points, as (N,) bool."""
    import torch

    device = best_device()
    origin = points.mean(0)  # subtracting it leaves distances unchanged and improves their precision
    x, y = (torch.from_numpy((rows - origin).astype(np.float64)).to(device) for rows in (queries, points))
    # + 1 because each point is its own nearest neighbour
    radii = torch.cat([distances.kthvalue(NEIGHBOURS + 1, dim=1).values for distances in _squared_distances(y, y)])
    hits = torch.cat([(distances <= radii).any(1) for distances in _squared_distances(x, y)])
    result: np.ndarray = hits.cpu().numpy()
    return result


def _squared_distances(rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
    """Yield the squared distances between all rows and all columns, in blocks of shape (BLOCK_ROWS, M)."""
    lengths = (columns**2).sum(1)
    for block in rows.split(BLOCK_ROWS):
        yield ((block**2).sum(1, keepdim=True) + lengths - 2 * block @ columns.T).clamp_min(0)
