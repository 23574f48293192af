"""The work of a worker process: load the encoders once, then encode one tar after another."""

import atexit
import functools
import gc
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch._dynamo.exc import TorchDynamoException

from precompute.encode.encoders import FeatureEncoder, ImageEncoder, TextEncoder
from precompute.encode.networks import MAX_SHAPES, DeviceSettings, Offload
from precompute.encode.overlap import Turns
from precompute.encode.recipe import Recipe
from precompute.encode.tar import encode_tar
from precompute.encode.towers import DeviceClock, TextTowers, Towers
from precompute.input.captions import JSON_PREFIX, read_captions, read_scores
from precompute.input.reject import Reject
from precompute.input.table import TableConfig, table_settings, with_tables
from precompute.input.unit import RawSample, Unit
from shards.base.device import is_accelerator
from shards.base.errors import RequestError, UnfitNode
from shards.base.pool import configure_malloc
from shards.base.scratch import use_scratch
from shards.base.store import Store
from shards.derive.part import Captions, Derivation, NewCaption, Settings, SourceTar, derive_tar, kept_uncond
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.models import recorded_folder
from shards.format.towers import TextTower, Weights
from shards.open import open_store
from shards.root.committed import TarReceipts
from shards.root.provenance import Stopwatch, made_by, source_sha256
from shards.root.shared import has_uncond, load_uncond, write_uncond

TURNS, LOADING = Turns(), threading.Lock()
"""Shared by the tars that this process has in flight, each of which has its own thread."""


def encode_on_worker(
    tar: Unit | SourceTar,
    attempt: int,
    report: Callable[[int], None],
    recipe: Recipe,
    output: Path | str,
    device: str,
    num_cpus: float,
    source: str,
) -> TarReceipts:
    """Try once to encode a tar, or to derive its parts from another root, and commit the result at `output`.

    Args:
        report: called with the number of samples processed so far.
        source: SHA-256 of the driver's source code.

    Raises:
        UnfitNode: this node has different code or models, or does not see the latents root that the job created.
    """
    set_up_attempt(recipe, device, num_cpus, source)
    store = open_store(output)
    check_shared_root(store, recipe.encoding)
    if isinstance(tar, SourceTar):
        with TURNS.device:
            return derive_tar(tar, with_fresh_towers(recipe, store, device), attempt, report)
    with LOADING:
        towers = load_towers(recipe, device)
    return encode_tar(tar, recipe, store, towers, attempt, report, TURNS)


def set_up_attempt(recipe: Recipe, device: str, num_cpus: float, source: str) -> None:
    """Set up this process for an attempt. Raises UnfitNode if this node's source code does not have the SHA-256
    `source`, the driver's."""
    check_source(source)
    with LOADING:
        scratch_of_process(recipe.worker.scratch)
    # on the CPU, encoders use all of the worker's cores; with a GPU, torch only resizes images, in decoding threads,
    # each of which uses one core
    torch.set_num_threads(1 if is_accelerator(device) else max(1, int(num_cpus)))


def check_source(expected: str) -> None:
    """Raise UnfitNode unless the SHA-256 of this process's source code is `expected`, the driver's. Otherwise, nothing
    would distinguish parts that were encoded by different versions."""
    if source_sha256() != expected:
        raise UnfitNode(
            f"The node {os.uname().nodename} is running a different version of latentmill than the driver: the "
            f"SHA-256 of its source is {source_sha256()}, and the driver's is {expected}. Nothing was encoded on this "
            f"node. Install the driver's version on the node, or remove the node from the cluster."
        )


scratch_of_process = functools.cache(use_scratch)
"""Set the scratch folder of this process. Call this before anything is written; repeated calls do nothing."""


def check_shared_root(store: Store, encoding: EncodingRecord) -> None:
    """Raise UnfitNode unless this worker sees the root that the driver created."""
    try:
        shared = EncodingRecord.load(store).id == encoding.id
    except RequestError:
        shared = False
    if not shared:
        raise UnfitNode(
            f"{store.where()} on {os.uname().nodename} is not the latents root that the job created, so the nodes do "
            f"not share this folder. Set `output` to a folder that exists at the same path on all nodes, or to an "
            f"object-store URL."
        )


Networks = tuple[ImageEncoder, dict[str, TextEncoder], dict[str, FeatureEncoder]]


def load_towers(recipe: Recipe, device: str) -> Towers:
    """Load the towers of the recipe's encoding on `device`, and keep their networks for the next call. Raises UnfitNode
    if this node lacks a model that encoding.json records, or cannot multiply in float8 although a tower needs it."""
    worker = recipe.worker
    compiled = worker.compiles(torch.device(device))
    image, texts, features = _kept_networks(recipe.encoding.sealed(), device, compiled, worker.one_by_one)
    sizes = worker.batch_size, recipe.batch_sizes
    towers = Towers(texts, *sizes, worker.one_by_one, image=image, features=features)
    if compiled:
        compile_now(towers, recipe.buckets.all)
    return towers


def compile_now(towers: TextTowers, buckets: Iterable[Bucket] = ()) -> None:
    """Run the towers once, so that they are compiled before any tar is timed. Raises UnfitNode if this node cannot
    compile them."""
    # a setting of each thread, and another thread may have loaded the towers
    torch._dynamo.config.recompile_limit = MAX_SHAPES
    try:
        towers.warm_up(buckets)
    except TorchDynamoException as error:
        raise UnfitNode(
            f"torch.compile failed on the node {os.uname().nodename} ({' '.join(str(error).split())[:300]}). On GPUs, "
            f"it needs a C compiler in addition to torch's triton. Install a C compiler on that node, or set "
            f"workers.compile to false."
        ) from error


@functools.lru_cache(maxsize=1)
def _kept_networks(encoding_json: bytes, device: str, compiled: bool, one_by_one: bool) -> Networks:
    encoding = EncodingRecord.parse(encoding_json, "this job's encoding record")
    networks = load_networks(encoding, device, compiled, one_by_one)
    prepare_process()
    return networks


def load_networks(encoding: EncodingRecord, device: str, compiled: bool, one_by_one: bool) -> Networks:
    """Load the networks of all towers on `device`, or in host memory if they run one by one. Raises UnfitNode if this
    node lacks a model that `encoding` records, or cannot multiply in float8 although a tower needs it."""
    settings = device_settings(encoding, torch.device(device), compiled, one_by_one)
    texts = load_texts(encoding.texts, settings)
    features = {
        name: FeatureEncoder(_recorded(tower.weights), tower, settings) for name, tower in encoding.features.items()
    }
    return ImageEncoder(_recorded(encoding.image.weights), encoding.image, settings), texts, features


def device_settings(encoding: EncodingRecord, device: torch.device, compiled: bool, one_by_one: bool) -> DeviceSettings:
    """Build the settings shared by all networks of an encoding."""
    return DeviceSettings(device, encoding.compute_dtype, compiled, Offload(device) if one_by_one else None)


def load_texts(towers: dict[str, TextTower], settings: DeviceSettings) -> dict[str, TextEncoder]:
    """Load the networks of text towers."""
    return {
        name: TextEncoder(_recorded(tower.weights), _recorded(tower.tokenizer), tower, settings)
        for name, tower in towers.items()
    }


def with_fresh_towers(recipe: Recipe, store: Store, device: str) -> Derivation:
    """Build the derivation from the source root to the job's root, with the text towers that re-encode captions."""
    assert recipe.source is not None
    conversion, worker = recipe.source.conversion, recipe.worker
    on = torch.device(device)
    texts = _kept_texts(recipe.encoding.sealed(), conversion.reencoded, device, worker.compiles(on), worker.one_by_one)
    towers = TextTowers(texts, worker.batch_size, recipe.batch_sizes, worker.one_by_one)
    if worker.compiles(on):
        compile_now(towers)
    source = open_store(recipe.source.place)
    if not has_uncond(store):
        write_uncond(store, kept_uncond(load_uncond(source), conversion) | towers.empty_caption())

    def encode(captions: list[str], stopwatch: Stopwatch) -> Captions:
        clock = DeviceClock(on, stopwatch)
        try:
            with stopwatch("encode"):
                encoded = towers.start_captions(captions, clock)()
            yield from stopwatch.waiting("encode", encoded)
        finally:
            clock.stop()

    settings: Settings = {"device": made_by(on).gpu, **recipe.batches(on)}
    settings |= table_settings(recipe.tables)
    settings = {f"derived.{name}": value for name, value in settings.items()}
    found = Counter[str]()
    texts_change, numbers_change = conversion.has_new_captions, conversion.has_new_scores
    changed = (
        replace(table, texts=table.texts if texts_change else (), numbers=table.numbers if numbers_change else ())
        for table in recipe.tables
    )
    tables = [table for table in changed if table.columns]
    renew = None
    if texts_change or numbers_change:
        renew = partial(renewed, encoding=recipe.encoding, tables=tables, found=found)

    def counts() -> Settings:
        columns = (column for table in tables for column in table.columns)
        counted: Settings = {f"derived.tables.{column}.found": found[column] for column in columns}
        found.clear()
        return counted

    return Derivation(source, store, conversion, encode, on, settings, renew, counts)


def renewed(
    keys: list[str],
    captions: list[dict[str, str]],
    scores: list[dict[str, float]],
    encoding: EncodingRecord,
    tables: Sequence[TableConfig],
    found: Counter[str],
) -> Iterator[tuple[list[NewCaption | None], np.ndarray]]:
    """Choose the captions and scores of stored samples from tables and from their stored captions and scores. `found`
    counts the samples that have a value in a table, by column.

    Implements `shards.derive.part.Renew`.
    """
    samples = with_tables(map(RawSample, keys), tables, found)
    for raw, by_source, by_name in zip(samples, captions, scores, strict=True):
        raw.caption = by_source["txt"].encode() if "txt" in by_source else None
        raw.metadata = by_name | {name.removeprefix(JSON_PREFIX): text for name, text in by_source.items()}
        try:
            new = read_captions(raw, encoding.captions, encoding.max_characters)
        except Reject:  # no source has a caption
            new = [None] * len(encoding.captions)
        yield [None if one is None else (one.text, one.changes) for one in new], read_scores(raw, encoding.scores)


@functools.lru_cache(maxsize=1)
def _kept_texts(
    encoding_json: bytes, names: frozenset[str], device: str, compiled: bool, one_by_one: bool
) -> dict[str, TextEncoder]:
    encoding = EncodingRecord.parse(encoding_json, "this job's encoding record")
    towers = {name: encoding.texts[name] for name in sorted(names)}
    texts = load_texts(towers, device_settings(encoding, torch.device(device), compiled, one_by_one))
    prepare_process()
    return texts


def _recorded(weights: Weights) -> Path:
    """Return the folder on this node of a model that encoding.json records."""
    try:
        return recorded_folder(weights)
    except RequestError as error:
        raise UnfitNode(f"On node {os.uname().nodename}: {error}") from error


def prepare_process() -> None:
    """Tune memory allocation and garbage collection in this process, once its encoders are loaded."""
    configure_malloc()
    # this imports pandas, if installed; importing it later would stall the device at the end of the first tar
    pa.array([None])
    gc.collect()
    atexit.register(gc.unfreeze)  # some libraries complain at exit about objects that were never collected
    gc.freeze()  # otherwise each collection scans everything that libraries created at import
