"""Metrics against those of torchmetrics and torch-fidelity, on random features in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_prc import calculate_precision_recall_full
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance

from evaluate.features.extractors import ExtractorConfig, ExtractorsConfig, describe_extractor, load_extractor
from evaluate.metrics.frechet import Moments, frechet_distance
from evaluate.metrics.kernels import kid
from evaluate.metrics.manifold import precision, recall
from shards.base.errors import RequestError

DIMENSIONS = 12
GOLDEN = [5.3117069853e-08, 6.9220661203e-08, 3.7036953504e-09]


class Flat(nn.Module):
    """Pictures of 12 numbers are their own features."""

    num_features = DIMENSIONS

    def forward(self, pictures: Tensor) -> Tensor:
        """(N, 3, 2, 2) → (N, 12)."""
        return pictures.flatten(1)


@pytest.fixture
def two_sides() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(DIMENSIONS, DIMENSIONS))
    return rng.gamma(2, size=(300, DIMENSIONS)) @ mixing, rng.gamma(3, size=(250, DIMENSIONS)) @ mixing


def fed(metric: nn.Module, x: np.ndarray, y: np.ndarray) -> nn.Module:
    for rows, real in ((x, False), (y, True)):
        metric.update(torch.from_numpy(rows).reshape(-1, 3, 2, 2), real=real)  # type: ignore[operator]
    return metric


def test_frechet_as_torchmetrics_and_torch_fidelity_have_it(two_sides: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = two_sides
    found = frechet_distance(Moments.of(x), Moments.of(y))
    theirs = fed(FrechetInceptionDistance(feature=Flat(), input_img_size=(3, 2, 2)).set_dtype(torch.float64), x, y)
    assert found == pytest.approx(float(theirs.compute()), rel=1e-6)  # type: ignore[operator]
    statistics = [fid_features_to_statistics(torch.from_numpy(rows)) for rows in (x, y)]
    fidelity = fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
    assert found == pytest.approx(fidelity, rel=1e-6)


def test_kid_as_torchmetrics_has_it_over_one_subset_of_all(two_sides: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = two_sides[0][:250], two_sides[1]
    theirs = fed(KernelInceptionDistance(feature=Flat(), subsets=1, subset_size=250).set_dtype(torch.float64), x, y)
    mean, _ = theirs.compute()  # type: ignore[operator]
    assert kid(x, np.arange(250), y).value == pytest.approx(float(mean), rel=1e-6)


def test_precision_and_recall_as_torch_fidelity_has_them(two_sides: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = two_sides
    theirs = calculate_precision_recall_full(torch.from_numpy(x), torch.from_numpy(y), 3, 10000)
    assert precision(x, np.arange(300), y).value == pytest.approx(float(theirs[0]))
    assert recall(x, np.arange(300), y).value == pytest.approx(float(theirs[1]))


@pytest.fixture(scope="module")
def inception(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Inception in the file that torch-fidelity reads."""
    path: Path = tmp_path_factory.mktemp("inception") / "weights.pth"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_fidelity.feature_extractor_inceptionv3.load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
        torch.manual_seed(0)
        torch.save(FeatureExtractorInceptionV3("inception", ["2048"]).state_dict(), path)
    return path


def test_golden_features_of_a_seeded_random_inception(inception: Path) -> None:
    pixels = np.arange(2 * 40 * 50 * 3, dtype=np.int64).reshape(2, 40, 50, 3).astype(np.uint8)
    features = load_extractor("inception", inception, "cpu")(pixels)
    assert features.shape == (2, 2048) and features.dtype == torch.float32
    assert features[0, :3].tolist() == pytest.approx(GOLDEN, rel=1e-3)


def test_weights_that_would_run_code_are_refused(tmp_path: Path) -> None:
    torch.save({"weight": Path("x")}, tmp_path / "weights.pth")
    with pytest.raises(RequestError, match=r"weights\.pth cannot be read as weights alone"):
        load_extractor("inception", tmp_path / "weights.pth", "cpu")


def test_absent_and_other_weights_are_named(tmp_path: Path) -> None:
    path = tmp_path / "inception.pth"
    with pytest.raises(RequestError, match="weights of inception are not at"):
        describe_extractor("inception", ExtractorsConfig(inception=ExtractorConfig(weights=path)))
    with pytest.raises(RequestError, match=r"are not given. Give their local path as extractors\.inception\.weights"):
        describe_extractor("inception", ExtractorsConfig())
    with pytest.raises(RequestError, match="is not what inception is read from, torch-fidelity's file"):
        describe_extractor("inception", ExtractorsConfig(inception=ExtractorConfig(weights=tmp_path)))
    path.write_bytes(b"other")
    for weights in (path, tmp_path):  # a file; a folder that has other files
        with pytest.raises(RequestError, match="is not what clip is read from, a transformers folder"):
            describe_extractor("clip", ExtractorsConfig(clip=ExtractorConfig(weights=weights)))
    with pytest.raises(RequestError, match=r"hashes to d9298a10.* asks for 0000"):
        config = ExtractorsConfig(inception=ExtractorConfig(weights=path, sha256="0000"))
        describe_extractor("inception", config)
