"""Compare metrics with torchmetrics and torch-fidelity, on random features in float64.

The libraries are imported by the tests that need them, because each of pytest's processes imports this file.
"""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evaluation.metrics.frechet import Moments, frechet_distance
from evaluation.metrics.kernels import kid
from evaluation.metrics.manifold import precision, recall

DIMENSIONS = 12


class Flat(nn.Module):
    """An extractor that flattens images of 12 values."""

    num_features = DIMENSIONS

    def forward(self, pictures: Tensor) -> Tensor:
        """(N, 3, 2, 2) → (N, 12)."""
        return pictures.flatten(1)


@pytest.fixture
def feature_pair() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(DIMENSIONS, DIMENSIONS))
    return rng.gamma(2, size=(300, DIMENSIONS)) @ mixing, rng.gamma(3, size=(250, DIMENSIONS)) @ mixing


def updated(metric: nn.Module, x: np.ndarray, y: np.ndarray) -> nn.Module:
    """Feed generated features `x` and real features `y` to a metric of torchmetrics."""
    for rows, real in ((x, False), (y, True)):
        metric.update(torch.from_numpy(rows).reshape(-1, 3, 2, 2), real=real)  # type: ignore[operator]
    return metric


def test_frechet_matches_torchmetrics_and_torch_fidelity(feature_pair: tuple[np.ndarray, np.ndarray]) -> None:
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
    from torchmetrics.image.fid import FrechetInceptionDistance

    x, y = feature_pair
    found = frechet_distance(Moments.of(x), Moments.of(y))
    expected = updated(
        FrechetInceptionDistance(feature=Flat(), input_img_size=(3, 2, 2)).set_dtype(torch.float64), x, y
    )
    assert found == pytest.approx(float(expected.compute()), rel=1e-6)  # type: ignore[operator]
    statistics = [fid_features_to_statistics(torch.from_numpy(rows)) for rows in (x, y)]
    fidelity = fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
    assert found == pytest.approx(fidelity, rel=1e-6)


def test_kid_matches_torchmetrics_with_all_samples_in_one_subset(feature_pair: tuple[np.ndarray, np.ndarray]) -> None:
    from torchmetrics.image.kid import KernelInceptionDistance

    x, y = feature_pair[0][:250], feature_pair[1]
    expected = updated(
        KernelInceptionDistance(feature=Flat(), subsets=1, subset_size=250).set_dtype(torch.float64), x, y
    )
    mean, _ = expected.compute()  # type: ignore[operator]
    assert kid(x, np.arange(250), y).value == pytest.approx(float(mean), rel=1e-6)


def test_precision_and_recall_match_torch_fidelity(feature_pair: tuple[np.ndarray, np.ndarray]) -> None:
    from torch_fidelity.metric_prc import calculate_precision_recall_full

    x, y = feature_pair
    expected = calculate_precision_recall_full(torch.from_numpy(x), torch.from_numpy(y), 3, 10000)
    assert precision(x, np.arange(300), y).value == pytest.approx(float(expected[0]))
    assert recall(x, np.arange(300), y).value == pytest.approx(float(expected[1]))
