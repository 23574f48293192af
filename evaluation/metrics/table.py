"""All metrics by name, and metric ids.

An id is a hash of everything that affects a metric's value, except the model. Values are comparable only if their ids
are equal.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from evaluation.metrics.frechet import Moments, check_enough, frechet_at_n, frechet_infinity
from evaluation.metrics.intervals import MIN_CLUSTERS, Estimate, mean_interval
from evaluation.metrics.kernels import cmmd, kid
from evaluation.metrics.manifold import precision, recall
from shards.base.durable import canonical_json
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
RESULT, RECORDS = "metrics.json", "metrics"
"""File with all metrics of a sample set, and folder with a record of each."""
Row = dict[str, Any]
"""One metric of one sample set, with the keys metric, value, low, high, estimand, n, reference_n, id, better, model,
step, weights and setting."""
NOT_IN_ID = ("seed",)
"""Fields of a drawing that are excluded from the id. A different seed gives another draw of the same metric."""


@dataclass(frozen=True)
class MetricInputs:
    """Everything that metrics are computed from."""

    features: np.ndarray
    """(N, D) features of the samples."""
    clusters: np.ndarray
    """(N,) int ids of the samples' prompts."""
    reference: np.ndarray | None
    """(M, D) features of the reference."""
    texts: np.ndarray | None
    """(N, D) features of the samples' prompts."""
    moments: Moments | None = None
    """Moments of the reference, if they are given instead of its features."""


@dataclass(frozen=True)
class Metric:
    """A metric over the features of one extractor."""

    extractor: ExtractorName
    compute: Callable[[MetricInputs], Estimate]
    better: Literal["lower", "higher"]
    compared_with: Literal["nothing", "moments", "features"] = "features"
    """Part of the reference that the metric needs."""
    is_frechet: bool = False
    """Whether it is a Fréchet distance, which needs more images than a feature has components."""


def clip_score(inputs: MetricInputs) -> Estimate:
    """Estimate the CLIP score: the mean of max(0, 100·cos(image, prompt)) (Hessel et al., 2021, with weight 100)."""
    assert inputs.texts is not None
    x, y = inputs.features.astype(np.float64), inputs.texts.astype(np.float64)
    cosines = (x * y).sum(1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))
    scores = np.maximum(100 * cosines, 0)
    estimand = "mean over prompts like these, and over draws"
    return mean_interval(scores, inputs.clusters, estimand, lowest=0, highest=100)


def _fid(inputs: MetricInputs) -> Estimate:
    moments, dimensions = inputs.moments, inputs.features.shape[1]
    if moments is None:
        reference = _reference(inputs)
        check_enough(np.arange(len(reference)), reference.shape[1], "the reference")
        moments = Moments.of(reference)
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
            f"A metric with an interval needs at least {MIN_CLUSTERS} reference images, but the reference has only "
            f"{len(inputs.reference)}. Set reference.pictures to a larger set, and reference.place to a new location."
        )
    return inputs.reference


METRICS: dict[MetricName, Metric] = {
    "fid": Metric("inception", _fid, "lower", "moments", is_frechet=True),
    "fid_infinity": Metric("inception", _with_reference(frechet_infinity), "lower", is_frechet=True),
    "kid": Metric("inception", _with_reference(kid), "lower"),
    "precision": Metric("inception", _with_reference(precision), "higher"),
    "recall": Metric("inception", _with_reference(recall), "higher"),
    "clip_fid": Metric("clip", _fid, "lower", "moments", is_frechet=True),
    "cmmd": Metric("clip", _with_reference(cmmd), "lower"),
    "clip_score": Metric("clip", clip_score, "higher", "nothing"),
    "fd_dinov2": Metric("dinov2", _fid, "lower", "moments", is_frechet=True),
    "toy_fid": Metric("toy", _fid, "lower", "moments", is_frechet=True),
    "toy_kid": Metric("toy", _with_reference(kid), "lower"),
}


def metric_id(name: str, extractor: dict[str, Any], drawing: dict[str, Any], reference: str | None) -> str:
    """Return 16 hex digits that identify a metric.

    Args:
        extractor: the extractor's description, including the hash of its weights and its resizing.
        drawing: how images are drawn and stored, including their number and the hash of the prompts.
        reference: id of the reference, or None for metrics without one.
    """
    kept = {key: value for key, value in drawing.items() if key not in NOT_IN_ID}
    content = {"metric": name, "extractor": extractor, "drawing": kept, "reference": reference}
    return hashlib.sha256(canonical_json(content)).hexdigest()[:16]
