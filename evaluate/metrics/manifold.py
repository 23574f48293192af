"""Improved precision and recall (Kynkäänniemi et al., 2019): whose pictures lie near the others'.

A set's manifold is the union of balls about its points, each as wide as the way to its third nearest neighbour.
Precision is the share of the samples in the reference's manifold; recall that of the reference in the samples'.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from evaluate.metrics.intervals import GROUPS, Estimate, groups_of, of_groups, share_interval

NEIGHBOURS = 3
ROWS = 1024
"""At a time."""


def precision(features: np.ndarray, clusters: np.ndarray, reference: np.ndarray) -> Estimate:
    """The share of the model's pictures that are in the reference's manifold."""
    x, y = _tensors(features, reference)
    radii = radii_without(y, [np.ones(len(reference), bool)])
    hits = covered(x, y, radii, [np.ones(len(reference), bool)])[0]
    return share_interval(hits, clusters, "share of all that the model draws that is in this reference's manifold")


def recall(features: np.ndarray, clusters: np.ndarray, reference: np.ndarray) -> Estimate:
    """The share of the reference that is in the manifold of (N, D) features."""
    x, y = _tensors(features, reference)
    groups = groups_of(clusters)
    kept = [np.ones(len(features), bool), *(groups != group for group in range(GROUPS))]
    shares = covered(y, x, radii_without(x, kept), kept).mean(1)
    estimand = f"mean over draws of {len(features)} samples, of this reference"
    return of_groups(float(shares[0]), shares[1:]).interval(estimand)


def radii_without(points: Tensor, kept: list[np.ndarray]) -> Tensor:
    """(len(kept), N) squared radii of each point's ball among those of the (N, D) points that are kept."""
    rows = []
    for _, distances in _blocks(points, points):
        # itself is the nearest of them
        nearest = [distances[:, torch.from_numpy(mask)].kthvalue(NEIGHBOURS + 1, dim=1).values for mask in kept]
        rows.append(torch.stack(nearest))
    return torch.cat(rows, dim=1)


def covered(queries: Tensor, points: Tensor, radii: Tensor, kept: list[np.ndarray]) -> np.ndarray:
    """(len(kept), M) whether each of the (M, D) queries lies in the ball of a point that is kept."""
    found = []
    for _, distances in _blocks(queries, points):
        inside = [(distances <= own)[:, torch.from_numpy(mask)] for own, mask in zip(radii, kept, strict=True)]
        found.append(torch.stack([hits.any(1) for hits in inside]))
    return torch.cat(found, dim=1).cpu().numpy()


def _blocks(rows: Tensor, columns: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(ROWS, M) squared distances of some rows from all columns, block by block."""
    square = (columns**2).sum(1)
    for start in range(0, len(rows), ROWS):
        block = rows[start : start + ROWS]
        yield start, ((block**2).sum(1, keepdim=True) + square - 2 * block @ columns.T).clamp_min(0)


def _tensors(features: np.ndarray, reference: np.ndarray) -> tuple[Tensor, Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    origin = reference.mean(0)  # distances stay, and digits with them
    x, y = (torch.from_numpy((rows - origin).astype(np.float64)).to(device) for rows in (features, reference))
    return x, y
