"""Extract features from a source's units on Ray, store them in parts, and read them back as one array."""

import hashlib
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from cluster.fleet import FleetConfig
from evaluation.features.extractors import (
    ExtractorsConfig,
    describe_extractor,
    extractor_id,
    load_extractor,
    load_text_features,
)
from evaluation.features.sources import InputRecord, ReferenceConfig, SampleUnit, Unit, reference_units, say_once
from evaluation.metrics.frechet import Moments
from evaluation.metrics.table import ExtractorName
from evaluation.parts import PartReceipt, check_same, commit_part, create_once, read_part, read_receipts, read_sealed
from evaluation.units import keep_last, run_units
from shards.base.device import worker_device
from shards.base.durable import canonical_json
from shards.base.errors import RequestError, WorkError
from shards.base.store import Store
from shards.open import open_store

RECORD = "reference.json"
NO_REFERENCE = (
    "No reference is set. Set reference.place to the folder or URL of the reference's features. If the features do not "
    "exist yet, also set reference.pictures to the reference's images. Alternatively, set reference.moments."
)
MAX_ROUNDING = 1e-4
"""Maximum size of a negative eigenvalue of a covariance that may be due to rounding, relative to the largest one."""
ISOLATE_FROM = 2
"""First attempt that decodes images in a child process, because an image may have crashed the previous attempt."""
FEATURES, TEXTS = "features.npy", "texts.npy"
cached_extractor, cached_text_encoder = keep_last(load_extractor), keep_last(load_text_features)
"""Cached loaders, so that a worker loads each network once for all its units."""


@dataclass(frozen=True)
class Features:
    """Features of all images of a source, in source order."""

    values: np.ndarray
    """(N, D) float32."""
    texts: np.ndarray | None
    """(N, D) features of the samples' prompts, if the extractor has a text encoder."""
    extractor: dict[str, Any]
    """The extractor's description, as returned by `describe_extractor`."""
    inputs: dict[str, str]
    """Name of each unit → SHA-256 of its input."""
    rejected: dict[str, int]
    """Reason → number of rejected images."""


def extract(
    units: Sequence[Unit], kind: ExtractorName, config: ExtractorsConfig, place: Path | str, workers: FleetConfig
) -> Features:
    """Return the features of all units. Missing features are computed on Ray and stored at `place`.

    Raises:
        RequestError: the extractor's weights are missing or unexpected.
        WorkError: some units failed.
    """
    description = describe_extractor(kind, config)
    folder, store = f"features/{extractor_id(description)}", open_store(place)
    weights = None if kind == "toy" else getattr(config, kind).weights.absolute()
    names = [unit.name for unit in units]
    receipts = read_receipts(store, folder, names)
    missing = [(unit.name, unit) for unit in units if unit.name not in receipts]
    device = worker_device(workers.num_gpus)
    function = partial(extract_on_worker, kind, weights, place, folder, config.batch_size, device)
    run_units(missing, function, workers, kind)
    return read_features(store, folder, names, description, receipts)


def read_features(
    store: Store,
    folder: str,
    names: Sequence[str],
    description: dict[str, Any],
    known: dict[str, PartReceipt] | None = None,
) -> Features:
    """Read the committed parts `names` and join them. Receipts in `known` are not reread."""
    known = known or {}
    found = read_receipts(store, folder, [name for name in names if name not in known]) | known
    receipts = {name: found[name] for name in names if name in found}
    if len(receipts) < len(names):
        raise WorkError(
            f"{store.where(folder)} has the features of only {len(receipts)} of {len(names)} parts. To extract the "
            f"others, run the same command with reference.pictures set to the reference's images."
        )
    rejected = sum((Counter(receipt["rejected"]) for receipt in receipts.values()), Counter[str]())
    parts = [read_part(store, receipt) for receipt in receipts.values() if receipt["count"]]
    if not parts:
        raise WorkError(
            f"{store.where(folder)} has no features, because every image was rejected ({_list_reasons(rejected)}). Use "
            f"different images, or if they are too_small, a smaller size."
        )
    values, texts = (
        [np.load(io.BytesIO(part[name]), allow_pickle=False) for part in parts if name in part]
        for name in (FEATURES, TEXTS)
    )
    inputs = {name: receipt["input"] for name, receipt in receipts.items()}
    joined_texts = np.concatenate(texts) if texts else None
    return Features(np.concatenate(values), joined_texts, description, inputs, rejected)


def _list_reasons(rejected: dict[str, int]) -> str:
    return ", ".join(f"{reason}: {count:,}" for reason, count in sorted(rejected.items()))


def extract_on_worker(
    kind: ExtractorName,
    weights: Path | None,
    place: Path | str,
    folder: str,
    batch_size: int,
    device: str,
    unit: Unit,
    attempt: int,
    report: Callable[[int], None],
) -> PartReceipt:
    """Make one attempt at one unit: extract its features, and store them in `folder` below `place`.

    On the first attempt, an image that crashes or hangs its decoder takes down the worker. Later attempts decode in a
    child process, so that only such an image is rejected and the others are kept.

    Args:
        report: called with the number of images processed so far.
    """

    def check_finite(features: torch.Tensor) -> np.ndarray:
        values: np.ndarray = features.cpu().numpy()
        if not np.isfinite(values).all():
            raise WorkError(
                f"{kind} returned non-finite features for the part {unit.name}, so the weights of {kind} are damaged "
                f"or do not match the model. Nothing was stored for this part. Set extractors.{kind}.weights to "
                f"different weights."
            )
        return values

    def write(private: Path) -> PartReceipt:
        extractor = cached_extractor(kind, weights, device)
        record, rows = InputRecord(), []
        with closing(unit.pictures(record, isolate=attempt >= ISOLATE_FROM)) as pictures:
            for batch in batches(pictures, batch_size):
                rows.append(check_finite(extractor(batch)))
                report(sum(map(len, rows)))
        if rows:
            np.save(private / FEATURES, np.concatenate(rows))
        if kind == "clip" and isinstance(unit, SampleUnit) and weights is not None:
            encode = cached_text_encoder(weights, device)
            starts = range(0, len(unit.texts), batch_size)
            texts = [check_finite(encode(list(unit.texts[start : start + batch_size]))) for start in starts]
            np.save(private / TEXTS, np.concatenate(texts))
        return {"count": sum(map(len, rows)), "rejected": dict(record.rejected), "input": record.input}

    return commit_part(open_store(place), folder, unit.name, write)


def batches(pictures: Iterable[np.ndarray], batch_size: int) -> Iterator[np.ndarray]:
    """Stack images into batches, (N, height, width, 3) uint8. The last batch may be smaller."""
    pictures = iter(pictures)
    while batch := list(islice(pictures, batch_size)):
        yield np.stack(batch)


def reference_features(
    config: ReferenceConfig, kind: ExtractorName, extractors: ExtractorsConfig, workers: FleetConfig
) -> tuple[Features, str]:
    """Return a reference's features, and an id that covers its images and their preprocessing. If images were rejected,
    print how many, once.

    Raises:
        RequestError: the reference does not exist, or was made from different images or with different settings.
        WorkError: some units failed.
    """
    if config.place is None:
        raise RequestError(NO_REFERENCE)
    store, record = open_store(config.place), config.record()
    if config.pictures is not None:
        units, listed = reference_units(config)
        names = [unit.name for unit in units]
        content = record | {"units": names, "pictures": config.pictures, "files": listed}
        check_same(store, create_once(store, RECORD, lambda: content), content, "a reference", "reference.place")
        features = extract(units, kind, extractors, config.place, workers)
    else:
        content = check_reference(config)
        description = describe_extractor(kind, extractors)
        features = read_features(store, f"features/{extractor_id(description)}", content["units"], description)
    if features.rejected:
        advice = (
            f" Images that do not cover reference.size ({config.size}) are too_small. To include them, lower "
            f"sampling.size and reference.size, and set reference.place to a new location."
        )
        say_once(
            f"warning: the reference in {store.where()} contains {len(features.values):,} images. Others were rejected "
            f"({_list_reasons(features.rejected)}), so the metrics do not cover them."
            f"{advice if 'too_small' in features.rejected else ''}"
        )
    identity = {key: content[key] for key in record} | {"inputs": features.inputs}
    return features, hashlib.sha256(canonical_json(identity)).hexdigest()[:16]


def check_reference(config: ReferenceConfig) -> dict[str, Any]:
    """Check that a reference, and its images if they are named, can be found, before images are drawn. Return its
    record, which is empty for a new reference.

    Raises:
        RequestError: the reference or its images do not exist, or it was made with different settings.
    """
    if config.place is None:
        raise RequestError(NO_REFERENCE)
    store, record = open_store(config.place), config.record()
    content = read_sealed(store, RECORD) or {}
    if config.pictures is not None:
        reference_units(config)
    elif not content:
        raise RequestError(
            f"{store.where()} is not a reference: it has no {RECORD}. To create a reference there, set "
            f"reference.pictures."
        )
    if content:
        check_same(store, {key: content.get(key) for key in record}, record, "a reference", "reference.place")
    return content


def read_moments(path: Path) -> tuple[Moments, str]:
    """Read published moments from an npz file, and return them with their id, which is a hash of the file.

    Raises:
        RequestError: the file is missing, or does not contain a mean and a covariance.
    """
    try:
        data = path.read_bytes()
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            mean, covariance = (np.asarray(arrays[name], np.float64) for name in ("mu", "sigma"))
    except (OSError, ValueError, KeyError, TypeError, BadZipFile, EOFError) as error:
        raise RequestError(
            f"{path} cannot be read as moments: {error}. reference.moments must be an npz file with `mu`, of shape "
            f"(D,), and `sigma`, of shape (D, D)."
        ) from error
    is_valid = mean.ndim == 1 and covariance.shape == (len(mean), len(mean)) and np.allclose(covariance, covariance.T)
    if not is_valid or not np.isfinite(mean).all() or not np.isfinite(covariance).all():
        raise RequestError(
            f"{path} does not contain valid moments: `mu` has shape {mean.shape} and `sigma` has shape "
            f"{covariance.shape}. The shapes must be (D,) and (D, D), and `sigma` must be symmetric and finite."
        )
    variances = np.linalg.eigvalsh(covariance)
    if variances[0] < -MAX_ROUNDING * variances[-1]:
        raise RequestError(
            f"{path} does not contain valid moments: `sigma` has the eigenvalue {variances[0]:.3g}, but a covariance "
            f"has no negative ones. Compute the moments again."
        )
    return Moments(mean, covariance), hashlib.sha256(data).hexdigest()[:16]
