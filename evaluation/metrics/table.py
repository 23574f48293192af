"""All metrics by name: the extractor whose features they use, the computation, and which direction is better."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from evaluation.metrics.frechet import Moments, check_enough, frechet_at_n, frechet_infinity
from evaluation.metrics.intervals import MIN_CLUSTERS, Estimate, mean_interval
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
class MetricInputs:
    """Everything that a metric is computed from."""

    features: np.ndarray
    """(N, D) features of the samples."""
    clusters: np.ndarray
    """(N,) int ids of the samples' prompts."""
    reference: np.ndarray | None
    """(M, D) features of the reference."""
    texts: np.ndarray | None
    """(N, D) features of the samples' prompts."""
    moments: Callable[[], Moments] | None = None
    """Function that computes or reads the reference's moments."""


@dataclass(frozen=True)
class Metric:
    """A metric over the features of one extractor."""

    extractor: ExtractorName
    compute: Callable[[MetricInputs], Estimate]
    better: Literal["lower", "higher"]
    compared_with: Literal["nothing", "moments", "features"] = "features"
    """Part of the reference that the metric needs."""


def clip_score(inputs: MetricInputs) -> Estimate:
    """Estimate the CLIP score: max(0, 100·cos) between image and prompt (Hessel et al., 2021, with weight 100)."""
    assert inputs.texts is not None
    scores = np.maximum(100 * cosines(inputs.features, inputs.texts), 0)
    estimand = "mean over prompts like these, and over draws"
    return mean_interval(scores, inputs.clusters, estimand, lowest=0, highest=100)


def cosines(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return (N,) cosines between the rows of two (N, D) arrays."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    values: np.ndarray = (x * y).sum(1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))
    return values


def _fid(inputs: MetricInputs) -> Estimate:
    assert inputs.moments is not None
    if inputs.reference is not None:
        check_enough(_reference(inputs), "in the reference")
    moments, dimensions = inputs.moments(), inputs.features.shape[1]
    if len(moments.mean) != dimensions:
        raise RequestError(
            f"The reference's moments have {len(moments.mean)} dimensions, but the extractor's features have "
            f"{dimensions}, so the moments were computed with a different extractor. Set reference.moments to moments "
            f"from this extractor, or choose other metrics (--metrics)."
        )
    return frechet_at_n(inputs.features, inputs.clusters, moments)


def _with_reference(
    compute: Callable[[np.ndarray, np.ndarray, np.ndarray], Estimate],
) -> Callable[[MetricInputs], Estimate]:
    """Adapt a function of (features, clusters, reference) to `MetricInputs`."""
    return lambda inputs: compute(inputs.features, inputs.clusters, _reference(inputs))


def _reference(inputs: MetricInputs) -> np.ndarray:
    assert inputs.reference is not None
    if len(inputs.reference) < MIN_CLUSTERS:
        raise RequestError(
            f"The reference has only {len(inputs.reference)} images, but a metric with an interval needs at least "
            f"{MIN_CLUSTERS}. Set reference.pictures to a larger set, and reference.place to a new location."
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
