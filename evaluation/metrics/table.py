"""Every metric by name: over which extractor's features, how, and which way is better."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from evaluation.metrics.frechet import Moments, check_enough, frechet_at_n, frechet_infinity
from evaluation.metrics.intervals import LEAST_CLUSTERS, Estimate, mean_interval
from evaluation.metrics.kernels import cmmd, kid
from evaluation.metrics.manifold import precision, recall
from shards.base.errors import RequestError

MetricName = Literal[
    "fid",
    "fid_infinity",
    "kid",
    "precision",
    "recall",
    "clip_fid",
    "cmmd",
    "clip_score",
    "fd_dinov2",
    "toy_fid",
    "toy_kid",
]
ExtractorName = Literal["inception", "clip", "dinov2", "toy"]


@dataclass(frozen=True)
class Inputs:
    features: np.ndarray
    """(N, D) of the samples."""
    clusters: np.ndarray
    """(N,) int: which prompt each is of."""
    reference: np.ndarray | None
    """(M, D)."""
    texts: np.ndarray | None
    """(N, D) of the prompts."""
    moments: Callable[[], Moments] | None = None
    """Of the reference."""


@dataclass(frozen=True)
class Metric:
    extractor: ExtractorName
    compute: Callable[[Inputs], Estimate]
    better: Literal["lower", "higher"]
    held_against: Literal["nothing", "moments", "features"] = "features"
    """What it needs of a reference."""


def clip_score(inputs: Inputs) -> Estimate:
    """100·cos of picture and prompt, or 0 where that is less (Hessel et al., 2021, with weight 100), over samples."""
    assert inputs.texts is not None
    scores = np.maximum(100 * cosines(inputs.features, inputs.texts), 0)
    return mean_interval(scores, inputs.clusters, "mean over prompts like these and all draws")


def cosines(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(N,) of the rows of two (N, D)."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    values: np.ndarray = (x * y).sum(1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))
    return values


def _fid(inputs: Inputs) -> Estimate:
    assert inputs.moments is not None
    if inputs.reference is not None:
        check_enough(_reference(inputs), "in the reference")
    moments, dimensions = inputs.moments(), inputs.features.shape[1]
    if len(moments.mean) != dimensions:
        raise RequestError(
            f"The reference's moments are of {len(moments.mean)} features, and the extractor has {dimensions}: they "
            f"are another extractor's. Give reference.moments of this one, or other metrics (--metrics)."
        )
    return frechet_at_n(inputs.features, inputs.clusters, moments)


def _with_reference(compute: Callable[[np.ndarray, np.ndarray, np.ndarray], Estimate]) -> Callable[[Inputs], Estimate]:
    return lambda inputs: compute(inputs.features, inputs.clusters, _reference(inputs))


def _reference(inputs: Inputs) -> np.ndarray:
    assert inputs.reference is not None
    if len(inputs.reference) < LEAST_CLUSTERS:
        raise RequestError(
            f"The reference has {len(inputs.reference)} pictures, and a metric with its interval needs "
            f"{LEAST_CLUSTERS} or more. Give reference.pictures more of them, and another reference.place."
        )
    return inputs.reference


METRICS: dict[MetricName, Metric] = {
    "fid": Metric("inception", _fid, "lower", "moments"),
    "fid_infinity": Metric("inception", _with_reference(frechet_infinity), "lower"),
    "kid": Metric("inception", _with_reference(kid), "lower"),
    "precision": Metric("inception", _with_reference(precision), "higher"),
    "recall": Metric("inception", _with_reference(recall), "higher"),
    "clip_fid": Metric("clip", _fid, "lower", "moments"),
    "cmmd": Metric("clip", _with_reference(cmmd), "lower"),
    "clip_score": Metric("clip", clip_score, "higher", "nothing"),
    "fd_dinov2": Metric("dinov2", _fid, "lower", "moments"),
    "toy_fid": Metric("toy", _fid, "lower", "moments"),
    "toy_kid": Metric("toy", _with_reference(kid), "lower"),
}
