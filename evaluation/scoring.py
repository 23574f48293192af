"""A sample set → its metrics, each with its interval, N and id."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from cluster.fleet import FleetConfig
from evaluation.features.extractors import ExtractorsConfig, describe_extractor
from evaluation.features.job import NO_REFERENCE, Features, extract, read_moments, reference_features, reference_moments
from evaluation.features.sources import ReferenceConfig, sample_units
from evaluation.metrics.frechet import Moments
from evaluation.metrics.identity import metric_id
from evaluation.metrics.intervals import LEAST_CLUSTERS
from evaluation.metrics.table import METRICS, ExtractorName, Inputs, MetricName
from evaluation.parts import create_once
from evaluation.sampling.job import SampleSet
from shards.base.durable import sealed_json
from shards.base.errors import RequestError
from shards.open import open_store

RESULT, RECORDS = "metrics.json", "metrics"
Row = dict[str, Any]
"""metric, value, low, high, estimand, n, reference_n, id, better, model, step, weights, setting."""


def choose_metrics(
    wanted: Sequence[MetricName] | None, extractors: ExtractorsConfig, reference: ReferenceConfig
) -> list[MetricName]:
    """Those that were asked for, or all whose extractor is given; every extractor is seen to be there.

    Raises:
        RequestError: one of them lacks its weights, or needs more of the reference, or none is left.
    """
    given = [kind for kind in ("inception", "clip", "dinov2") if getattr(extractors, kind).weights is not None]
    given += ["toy"] if extractors.toy else []
    names = [name for name, metric in METRICS.items() if metric.extractor in given] if wanted is None else list(wanted)
    if not names:
        raise RequestError(
            "No metric can be taken: no extractor is given. Set extractors.inception.weights, extractors.clip.weights "
            "or extractors.dinov2.weights to local weights (docs/evaluation.md says where others have them from)."
        )
    for kind in {METRICS[name].extractor for name in names}:
        describe_extractor(kind, extractors)
    featured = [name for name in names if METRICS[name].held_against == "features"]
    if reference.moments is not None and featured:
        raise RequestError(
            f"{', '.join(featured)} cannot be held against moments alone, which reference.moments is. Say which "
            f"metrics are wanted, as in --metrics fid,clip_score, or give the reference's pictures."
        )
    return names


def check_measurable(names: Sequence[MetricName], num_prompts: int, size: str, reference: ReferenceConfig) -> None:
    """What can be said of a sample set before it is drawn.

    Raises:
        RequestError: the reference is of another size, has no place or cannot be read, or there are too few prompts.
    """
    if num_prompts < LEAST_CLUSTERS:
        raise RequestError(
            f"There are {num_prompts} prompts, and a metric's interval needs {LEAST_CLUSTERS} or more, however many "
            f"pictures each has: pictures of one prompt depend on each other. Give more prompts, or only draw (`make "
            f"sample`)."
        )
    if all(METRICS[name].held_against == "nothing" for name in names):
        return
    if reference.moments is not None:
        read_moments(reference.moments)
        return
    if reference.size != size:
        raise RequestError(
            f"The samples are {size} and the reference is {reference.size}: resized differently, they would differ by "
            f"that alone. Set reference.size to {size}."
        )
    if reference.place is None:
        raise RequestError(NO_REFERENCE)


def score(
    found: SampleSet,
    names: Sequence[MetricName],
    extractors: ExtractorsConfig,
    reference: ReferenceConfig,
    workers: FleetConfig,
) -> list[Row]:
    """Compute the metrics `names` of a sample set, and write them to its metrics.json.

    Each also has a record of its own, by its id. A number that has one is not computed again.

    Raises:
        RequestError: the reference is of another size, or there are too few samples.
        WorkError: features could not be taken.
    """
    check_measurable(names, len(found.prompts), found.drawing["size"], reference)
    by_extractor: dict[ExtractorName, list[MetricName]] = {}
    for name in names:
        by_extractor.setdefault(METRICS[name].extractor, []).append(name)
    rows, store = list[Row](), open_store(found.place)
    for kind, its in by_extractor.items():
        ours = extract(sample_units(found), kind, extractors, found.place, workers)
        theirs, reference_id, moments = None, None, None
        if any(METRICS[name].held_against != "nothing" for name in its):
            theirs, reference_id, moments = _read_reference(reference, kind, extractors, workers)
        for name in its:
            own_reference = None if METRICS[name].held_against == "nothing" else reference_id
            number = metric_id(name, ours.extractor, found.drawing, own_reference)
            make = partial(_row, name, number, found, ours, theirs, moments)
            rows.append(create_once(store, f"{RECORDS}/{name}-{number}.json", make))
    rows.sort(key=lambda row: list(METRICS).index(row["metric"]))
    store.write(RESULT, sealed_json({"metrics": rows}))
    return rows


def _read_reference(
    config: ReferenceConfig, kind: ExtractorName, extractors: ExtractorsConfig, workers: FleetConfig
) -> tuple[Features | None, str, Callable[[], Moments]]:
    """Its features, where there are more than moments; its id; its moments."""
    if config.moments is not None:
        moments, number = read_moments(config.moments)
        return None, number, lambda: moments
    theirs, number = reference_features(config, kind, extractors, workers)
    return theirs, number, partial(reference_moments, config, theirs, number)


def _row(
    name: MetricName,
    number: str,
    found: SampleSet,
    ours: Features,
    theirs: Features | None,
    moments: Callable[[], Moments] | None,
) -> Row:
    metric = METRICS[name]
    reference = theirs.values if theirs is not None and metric.held_against != "nothing" else None
    clusters = np.unique([prompt for receipt in found.parts.values() for prompt, _ in receipt["samples"]], False, True)
    estimate = metric.compute(Inputs(ours.values, clusters[1], reference, ours.texts, moments))
    return {
        "metric": name,
        **asdict(estimate),
        "n": len(ours.values),
        "reference_n": len(reference) if reference is not None else None,
        "id": number,
        "better": metric.better,
        "model": found.model.name,
        "step": found.model.step,
        "weights": found.model.weights,
        "setting": found.drawing["setting"],
    }


def table(rows: Sequence[Row]) -> str:
    shown = (
        "{metric:<13} {value:10.4f}  [{low:.4f}, {high:.4f}]  N {n}  id {id}  ({better} is better; 95 % of: {estimand})"
    )
    lines = [shown.format(**row) for row in rows]
    return "\n".join(lines)
