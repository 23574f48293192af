"""Compute the metrics of a sample set. Each result has a 95 % interval, a sample count and an id."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import numpy as np

from cluster.fleet import FleetConfig
from evaluation.features.extractors import ExtractorsConfig, count_features, describe_extractor
from evaluation.features.job import check_reference, extract, read_moments, reference_features
from evaluation.features.sources import ReferenceConfig, sample_units
from evaluation.metrics.frechet import check_enough
from evaluation.metrics.intervals import MIN_CLUSTERS
from evaluation.metrics.table import METRICS, RECORDS, RESULT, ExtractorName, MetricInputs, MetricName, Row, metric_id
from evaluation.parts import create_once
from evaluation.sampling.sets import SampleSet
from shards.base.durable import sealed_json
from shards.base.errors import RequestError
from shards.open import open_store


def choose_metrics(
    wanted: Sequence[MetricName] | None, extractors: ExtractorsConfig, reference: ReferenceConfig
) -> list[MetricName]:
    """Choose the metrics to compute, and check that their extractors' weights exist.

    Returns:
        `wanted`, or, if it is None, all metrics whose extractor has weights.

    Raises:
        RequestError: an extractor's weights are missing, a metric needs the reference's features but only moments are
            given, or no metric can be computed.
    """
    given = [kind for kind in ("inception", "clip", "dinov2") if getattr(extractors, kind).weights is not None]
    given += ["toy"] if extractors.toy else []
    names = [name for name, metric in METRICS.items() if metric.extractor in given] if wanted is None else list(wanted)
    if not names:
        raise RequestError(
            "No metric can be computed, because no feature extractor has weights. Set extractors.inception.weights, "
            "extractors.clip.weights or extractors.dinov2.weights to a local path. docs/evaluation.md lists where to "
            "download the weights."
        )
    for kind in {METRICS[name].extractor for name in names}:
        describe_extractor(kind, extractors)
    need_features = [name for name in names if METRICS[name].compared_with == "features"]
    if reference.moments is not None and need_features:
        raise RequestError(
            f"{', '.join(need_features)} cannot be computed from reference.moments, which contains only a mean and a "
            f"covariance. Choose other metrics, as in --metrics fid,clip_score, or set reference.pictures instead of "
            f"reference.moments."
        )
    return names


def check_measurable(
    names: Sequence[MetricName],
    num_prompts: int,
    images_per_prompt: int,
    size: str,
    extractors: ExtractorsConfig,
    reference: ReferenceConfig,
) -> None:
    """Check, before a sample set is drawn, that its metrics can be computed.

    Raises:
        RequestError: there are too few prompts or images, or the reference is not set, cannot be read, or differs from
            the samples in size.
    """
    if num_prompts < MIN_CLUSTERS:
        raise RequestError(
            f"The number of prompts is {num_prompts}, but a metric's interval needs at least {MIN_CLUSTERS}. More "
            f"images per prompt do not help, because images of the same prompt are not independent. Add prompts, "
            f"or use `make sample` to draw the images without computing metrics."
        )
    for kind in {METRICS[name].extractor for name in names if METRICS[name].is_frechet}:
        check_enough(np.repeat(np.arange(num_prompts), images_per_prompt), count_features(kind, extractors))
    if all(METRICS[name].compared_with == "nothing" for name in names):
        return
    if reference.moments is not None:
        read_moments(reference.moments)
        return
    if reference.size != size:
        raise RequestError(
            f"The samples have size {size}, but the reference has size {reference.size}. A difference in resizing "
            f"alone would change the metrics. Set reference.size to {size}."
        )
    check_reference(reference)


def score(
    samples: SampleSet,
    names: Sequence[MetricName],
    extractors: ExtractorsConfig,
    reference: ReferenceConfig,
    workers: FleetConfig,
) -> list[Row]:
    """Compute a sample set's metrics, and write them to its metrics.json.

    Every metric also gets a record named after its id. Metrics that already have a record are not recomputed.

    Raises:
        RequestError: the reference cannot be used or differs from the samples in size, or there are too few samples.
        WorkError: features could not be extracted.
    """
    drawing = samples.drawing
    check_measurable(names, len(samples.prompts), drawing["images_per_prompt"], drawing["size"], extractors, reference)
    by_extractor: dict[ExtractorName, list[MetricName]] = {}
    for name in names:
        by_extractor.setdefault(METRICS[name].extractor, []).append(name)
    rows, store = list[Row](), open_store(samples.place)
    prompt_ids = [prompt_id for receipt in samples.parts.values() for prompt_id, _ in receipt["samples"]]
    _, clusters = np.unique(prompt_ids, return_inverse=True)
    for kind, metrics in by_extractor.items():
        features = extract(sample_units(samples), kind, extractors, samples.place, workers)
        values, moments, reference_id = None, None, None
        if any(METRICS[name].compared_with != "nothing" for name in metrics):
            if reference.moments is not None:
                moments, reference_id = read_moments(reference.moments)
            else:
                found, reference_id = reference_features(reference, kind, extractors, workers)
                values = found.values
        inputs = MetricInputs(features.values, clusters, values, features.texts, moments)
        for name in metrics:
            used_reference = None if METRICS[name].compared_with == "nothing" else reference_id
            id = metric_id(name, features.extractor, samples.drawing, used_reference)
            rows.append(create_once(store, f"{RECORDS}/{name}-{id}.json", partial(_row, name, id, samples, inputs)))
    rows.sort(key=lambda row: list(METRICS).index(row["metric"]))
    store.write(RESULT, sealed_json({"metrics": rows}))
    return rows


def _row(name: MetricName, id: str, samples: SampleSet, inputs: MetricInputs) -> Row:
    metric = METRICS[name]
    reference = None if metric.compared_with == "nothing" else inputs.reference
    return {
        "metric": name,
        **asdict(metric.compute(inputs)),
        "n": len(inputs.features),
        "reference_n": None if reference is None else len(reference),
        "id": id,
        "better": metric.better,
        "model": samples.model.name,
        "step": samples.model.step,
        "weights": samples.model.weights,
        "setting": samples.drawing["setting"],
    }


def format_metrics(rows: Sequence[Row]) -> str:
    """Format metrics for the terminal, one per line."""
    line = (
        "{metric:<13} {value:z10.4f}  [{low:z.4f}, {high:z.4f}]  N {n}{against}  id {id}  "
        "({better} is better; 95 % interval of the {estimand})"
    )
    against = [f" against {row['reference_n']}" if row["reference_n"] else "" for row in rows]
    return "\n".join(line.format(**row, against=each) for row, each in zip(rows, against, strict=True))
