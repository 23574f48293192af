"""Features of every unit of a source, stored once in parts, and read back as one array."""

import functools
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
    Extractor,
    ExtractorsConfig,
    describe_extractor,
    extractor_id,
    load_extractor,
    load_text_features,
)
from evaluation.features.sources import ReferenceConfig, SampleUnit, Taken, Unit, reference_units
from evaluation.metrics.frechet import Moments
from evaluation.metrics.table import ExtractorName
from evaluation.parts import Receipt, commit_part, read_part, read_receipts, read_sealed, write_once
from evaluation.units import ending_broken_processes, run_units
from shards.base.device import is_accelerator, worker_device
from shards.base.durable import canonical_json
from shards.base.errors import RequestError, WorkError
from shards.base.store import Store
from shards.open import open_store

RECORD = "reference.json"
NO_REFERENCE = (
    "No reference is given. Set reference.place, and reference.pictures where it is new; or reference.moments."
)
ISOLATE_FROM = 2
"""Attempt from which pictures are decoded in a child process: the attempt before may have died of one of them."""
FEATURES, TEXTS, MOMENTS = "features.npy", "texts.npy", "moments.npz"


@dataclass(frozen=True)
class Recipe:
    kind: ExtractorName
    weights: Path | None
    folder: str
    """Of the features, in `place`."""
    place: Path | str
    batch_size: int
    device: str
    num_cpus: float


@dataclass(frozen=True)
class Features:
    """Of a whole source, in its order."""

    values: np.ndarray
    """(N, D) float32."""
    texts: np.ndarray | None
    """(N, D) of the samples' prompts, where the extractor has a text side."""
    extractor: dict[str, Any]
    inputs: dict[str, str]
    """Unit → SHA-256 of what it was taken from."""
    rejected: dict[str, int]


def extract(
    units: Sequence[Unit], kind: ExtractorName, config: ExtractorsConfig, place: Path | str, workers: FleetConfig
) -> Features:
    """Features of all units, those that are missing computed on Ray and kept at `place`.

    Raises:
        RequestError: the extractor's weights are missing, or others.
        WorkError: units failed.
    """
    description = describe_extractor(kind, config)
    folder, store = f"features/{extractor_id(description)}", open_store(place)
    weights = None if kind == "toy" else getattr(config, kind).weights.absolute()
    device = worker_device(workers.num_gpus)
    recipe = Recipe(kind, weights, folder, place, config.batch_size, device, workers.num_cpus)
    names = [unit.name for unit in units]
    receipts = read_receipts(store, folder, names)
    missing = [(unit.name, unit) for unit in units if unit.name not in receipts]
    run_units(missing, partial(extract_on_worker, recipe=recipe), workers, kind)
    return read_features(store, folder, names, description, receipts)


def read_features(
    store: Store,
    folder: str,
    names: Sequence[str],
    description: dict[str, Any],
    known: dict[str, Receipt] | None = None,
) -> Features:
    """Read the committed parts `names` and join them; receipts in `known` are not read again.

    Raises:
        WorkError: some are missing, or none holds a picture.
    """
    known = known or {}
    found = read_receipts(store, folder, [name for name in names if name not in known]) | known
    receipts = {name: found[name] for name in names if name in found}
    if len(receipts) < len(names):
        raise WorkError(
            f"{store.where(folder)} has features of {len(receipts)} of {len(names)} parts. Give the same command with "
            f"the pictures (reference.pictures), and it goes on."
        )
    parts = [read_part(store, receipt) for receipt in receipts.values() if receipt["count"]]
    if not parts:
        raise WorkError(f"{store.where(folder)} holds features of no picture: all were rejected, or too small.")
    values, texts = (
        [np.load(io.BytesIO(part[name]), allow_pickle=False) for part in parts if name in part]
        for name in (FEATURES, TEXTS)
    )
    rejected = sum((Counter(receipt["rejected"]) for receipt in receipts.values()), Counter[str]())
    inputs = {name: receipt["input"] for name, receipt in receipts.items()}
    joined = np.concatenate(texts) if texts else None
    return Features(np.concatenate(values), joined, description, inputs, rejected)


def extract_on_worker(unit: Unit, attempt: int, report: Callable[[int], None], recipe: Recipe) -> Receipt:
    """Make one attempt at one unit, and report the number of pictures processed so far.

    A picture that crashes its decoder or never ends costs the first attempt its worker. Later attempts decode in a
    child process, where such a picture is rejected and the others are kept.
    """
    torch.set_num_threads(1 if is_accelerator(recipe.device) else max(1, int(recipe.num_cpus)))
    with ending_broken_processes():
        make = partial(extract_part, unit, recipe, report, attempt >= ISOLATE_FROM)
        return commit_part(open_store(recipe.place), recipe.folder, unit.name, make)


def extract_part(unit: Unit, recipe: Recipe, report: Callable[[int], None], isolate: bool, folder: Path) -> Receipt:
    """Write the features of a unit's pictures to `folder`; with `isolate`, a child process decodes the pictures."""
    extractor = cached_extractor(recipe.kind, recipe.weights, recipe.device)
    taken, rows = Taken(), []
    with closing(unit.pictures(taken, isolate)) as pictures:
        for batch in batches(pictures, recipe.batch_size):
            rows.append(finite(extractor(batch).cpu().numpy(), unit, recipe))
            report(sum(map(len, rows)))
    if rows:
        np.save(folder / FEATURES, np.concatenate(rows))
    if recipe.kind == "clip" and isinstance(unit, SampleUnit) and recipe.weights is not None:
        encode = cached_texts(recipe.weights, recipe.device)
        starts = range(0, len(unit.texts), recipe.batch_size)
        texts = [encode(list(unit.texts[start : start + recipe.batch_size])).cpu().numpy() for start in starts]
        np.save(folder / TEXTS, finite(np.concatenate(texts), unit, recipe))
    return {"count": sum(map(len, rows)), "rejected": dict(taken.rejected), "input": taken.input}


def finite(values: np.ndarray, unit: Unit, recipe: Recipe) -> np.ndarray:
    """The values, (N, D).

    Raises:
        WorkError: some are not finite, and every metric over them would be wrong, some without a word.
    """
    if not np.isfinite(values).all():
        raise WorkError(
            f"{recipe.kind} gave features of {unit.name} that are not finite: its weights are damaged, or they do not "
            f"suit this code. Nothing of it is kept. Give other weights (extractors.{recipe.kind}.weights)."
        )
    return values


def batches(pictures: Iterable[np.ndarray], batch_size: int) -> Iterator[np.ndarray]:
    """(N, height, width, 3) uint8."""
    pictures = iter(pictures)
    while batch := list(islice(pictures, batch_size)):
        yield np.stack(batch)


@functools.lru_cache(maxsize=1)
def cached_extractor(kind: ExtractorName, weights: Path | None, device: str) -> Extractor:
    return load_extractor(kind, weights, device)


@functools.lru_cache(maxsize=1)
def cached_texts(weights: Path, device: str) -> Callable[[list[str]], torch.Tensor]:
    return load_text_features(weights, device)


def reference_features(
    config: ReferenceConfig, kind: ExtractorName, extractors: ExtractorsConfig, workers: FleetConfig
) -> tuple[Features, str]:
    """Features of the reference, and its id: of its pictures and of how they become pixels.

    Raises:
        RequestError: there is no such reference, or it was made otherwise.
    """
    if config.place is None:
        raise RequestError(NO_REFERENCE)
    store, record = open_store(config.place), config.record()
    if config.pictures is not None:
        units = reference_units(config)
        names = [unit.name for unit in units]
        content = record | {"units": names, "pictures": config.pictures}
        write_once(store, RECORD, content, lambda found: _another(store, found, content))
        found = extract(units, kind, extractors, config.place, workers)
    else:
        content = read_sealed(store, RECORD) or {}
        if not content:
            raise RequestError(f"{store.where()} is no reference. Make it: set reference.pictures, too.")
        if any(content.get(key) != value for key, value in record.items()):
            raise _another(store, content, record)
        description = describe_extractor(kind, extractors)
        found = read_features(store, f"features/{extractor_id(description)}", content["units"], description)
    named = {key: content[key] for key in record} | {"inputs": found.inputs}
    return found, hashlib.sha256(canonical_json(named)).hexdigest()[:16]


def read_moments(path: Path) -> tuple[Moments, str]:
    """Moments that others made, and their id.

    Raises:
        RequestError: the file is missing, or holds something else.
    """
    try:
        data = path.read_bytes()
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            mean, covariance = (np.asarray(arrays[name], np.float64) for name in ("mu", "sigma"))
    except (OSError, ValueError, KeyError, TypeError, BadZipFile, EOFError) as error:
        raise RequestError(
            f"{path} cannot be read as moments: {error}. They are an npz of `mu`, (D,), and `sigma`, (D, D)."
        ) from error
    sound = mean.ndim == 1 and covariance.shape == (len(mean), len(mean)) and np.allclose(covariance, covariance.T)
    if not sound or not np.isfinite(mean).all():
        raise RequestError(
            f"{path} holds no Gaussian: `mu` has the shape {mean.shape} and `sigma` {covariance.shape}, and they must "
            f"be (D,) and (D, D), finite and symmetric."
        )
    return Moments(mean, covariance), hashlib.sha256(data).hexdigest()[:16]


def reference_moments(config: ReferenceConfig, found: Features, reference_id: str) -> Moments:
    """The Gaussian of a reference's features, computed once: `mu` and `sigma` of an npz, as pytorch-fid has them.

    Raises:
        DamagedInput: the file is not as it was written.
    """

    def make(folder: Path) -> Receipt:
        moments = Moments.of(found.values)
        np.savez(folder / MOMENTS, mu=moments.mean, sigma=moments.covariance)
        return {"reference": reference_id, "count": len(found.values)}

    assert config.place is not None
    store = open_store(config.place)
    receipt = commit_part(store, f"moments/{extractor_id(found.extractor)}", reference_id, make)
    arrays = np.load(io.BytesIO(read_part(store, receipt)[MOMENTS]), allow_pickle=False)
    return Moments(arrays["mu"], arrays["sigma"])


def _another(store: Store, found: dict[str, Any], wanted: dict[str, Any]) -> RequestError:
    differ = ", ".join(f"{k} {found.get(k)!r} ≠ {v!r}" for k, v in wanted.items() if found.get(k) != v)
    return RequestError(
        f"{store.where()} is a reference of other pictures or another size: {differ} (there ≠ asked for). Pictures are "
        f"held against a reference of their own size, made in one way. Give another reference.place."
    )
