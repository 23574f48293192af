"""Resolve, check and open the streams of a run.

`find_data` runs in one process of a run and reads everything that can change, such as which index and which exclusion
lists are the newest. `open_data` runs in every process and reads only files named by content hash, so all machines and
restarts see the same data. On each machine, one process parses these files, and the others map the result into memory
(`node.py`).
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from shards.base.errors import RequestError
from shards.base.store import Store, resolved_place
from shards.base.table import counted
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.mds import MdsIndex
from shards.format.text import TextLatents
from shards.open import open_store
from shards.root.exclusions import exclusion_ids, load_exclusion
from shards.root.index import index_columns
from shards.root.manifest import current_ids, load_rows, newest_manifest, read_index
from shards.root.segments import save_arrays
from shards.root.shared import load_uncond
from train.data.cache import Cache
from train.data.node import SizeCheck, check_sizes, node_folder, once_per_node
from train.data.order import choose_per_epoch
from train.data.selection import FilterConfig, Selection, select
from train.data.spec import (
    DataConfig,
    DataSpec,
    FoundStream,
    OpenStream,
    StreamConfig,
    encoding_differences,
    keep_towers,
)

SIZE_CHECK_SECONDS = 10.0
"""Seconds that a run waits for its size check before the first step. A problem that is found later stops the run."""


@dataclass(frozen=True)
class FoundData:
    """The resolved streams of a run."""

    streams: tuple[FoundStream, ...]
    uncond: dict[str, TextLatents]
    """Latents of the empty caption, by text tower."""


def find_data(config: DataConfig, pins: Sequence[Mapping[str, Any]] = ()) -> FoundData:
    """Resolve the index and the exclusion lists of every stream, unless they are pinned.

    Args:
        pins: the streams in the fingerprint of an earlier checkpoint. If `config.index` is `pinned`, each applies to
            the stream at the same position, provided that it has the same bucket.

    Raises:
        RequestError: a root or bucket is missing, the encodings of two streams are incompatible, or a cache overlaps
            with a root.
    """
    check_locations(config)
    streams = []
    for number, stream in enumerate(config.streams):
        pin = pins[number] if number < len(pins) and config.index == "pinned" else {}
        try:
            streams.append(find_stream(open_store(stream.root), stream.bucket, pin))
        except RequestError as error:
            if not pin:
                raise
            raise RequestError(
                f"{error} If data.streams now names a different root, or lists the streams in a different order, "
                f"restore the list with which the run was trained instead."
            ) from error
    first = streams[0].encoding
    for stream, found in zip(config.streams[1:], streams[1:], strict=True):
        differences = encoding_differences(*(keep_towers(e, config.towers) for e in (first, found.encoding)))
        if differences:
            raise RequestError(
                f"The roots {config.streams[0].root} and {stream.root} cannot be mixed: {'; '.join(differences)}. "
                f"Choose roots that were encoded with the same models and settings."
            )
    return FoundData(tuple(streams), load_uncond(open_store(config.streams[0].root)))


def find_stream(store: Store, bucket: str, pin: Mapping[str, Any]) -> FoundStream:
    """Resolve the index and the exclusion lists of a bucket: those in `pin` if it is for this bucket, or the newest.

    Args:
        pin: `bucket`, `index_sha256` and `exclusions` from a checkpoint's fingerprint; empty: nothing is pinned.

    Raises:
        RequestError: the root, bucket or index does not exist.
    """
    if pin.get("bucket") != bucket:
        pin = {}
    encoding, manifest = EncodingRecord.load(store), newest_manifest(store)
    index = pin.get("index_sha256") or newest_index(store, bucket)
    read_index(store, bucket, index)  # fail here, before the other processes open it
    return FoundStream(
        encoding=encoding,
        index=index,
        exclusions=tuple(pin.get("exclusions", ()) if pin else exclusion_ids(store)),
        recalled=frozenset(manifest.recalled.get(bucket, ()) if manifest else ()),
    )


def newest_index(store: Store, bucket: str) -> str:
    """Return the ID of a bucket's newest index.

    Raises:
        RequestError: the root has no such bucket, or the bucket has not been published.
    """
    found = current_ids(store)
    if bucket in found:
        return found[bucket]
    present = ", ".join(sorted(found)) or "none"
    raise RequestError(
        f"The latents root {store.where()} has no bucket {bucket} (it has: {present}). Add the bucket to `buckets` in "
        f"the precompute config and run `make precompute` again, which encodes only that bucket. If a killed job has "
        f"already encoded the bucket, publish its parts with `python -m shards index {store.where()}` instead."
    )


def open_data(config: DataConfig, global_batch_size: int, found: FoundData | None = None) -> DataSpec:
    """Open and check every stream.

    Args:
        found: the result of `find_data` in one process of the run; None: `find_data` is called here.

    Raises:
        RequestError: an index is missing, or a stream has too few samples for one global batch.
    """
    found = found or find_data(config)
    streams = tuple(
        _open_stream(config, stream, theirs, global_batch_size)
        for stream, theirs in zip(config.streams, found.streams, strict=True)
    )
    size_check = None
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        size_check = SizeCheck([(stream.store, stream.config.bucket, stream.files) for stream in streams])
        size_check.wait(SIZE_CHECK_SECONDS)
    read = select_towers(config, found.streams[0].encoding)
    return DataSpec(
        image=read.image,
        texts=read.texts,
        features=read.features,
        uncond=found.uncond,
        streams=streams,
        steps_per_epoch=sum(stream.chosen for stream in streams) // global_batch_size,
        num_captions=max(theirs.encoding.most_captions for theirs in found.streams),
        size_check=size_check,
    )


def select_towers(config: DataConfig, encoding: EncodingRecord) -> EncodingRecord:
    """Return the record with only the text and feature towers named in `data.towers`.

    Raises:
        RequestError: the root lacks one of these towers.
    """
    present = [*(f"texts.{name}" for name in encoding.texts), *(f"features.{name}" for name in encoding.features)]
    if missing := [tower for tower in config.towers or () if tower not in present]:
        raise RequestError(
            f"data.towers names {', '.join(missing)}, but the latents root {config.streams[0].root} has "
            f"{', '.join(present)}. Choose from the towers of the root, or encode a root with the missing towers."
        )
    return keep_towers(encoding, config.towers)


def check_locations(config: DataConfig) -> None:
    """Check that no bucket occurs twice, that remote roots have a cache, and that no cache overlaps with a root.

    Raises:
        RequestError: one of these checks fails, or a cache folder contains other files.
    """
    buckets = [(resolved_place(stream.root), stream.bucket) for stream in config.streams]
    roots = [stream.root.resolve() for stream in config.streams if isinstance(stream.root, Path)]
    for stream, bucket in zip(config.streams, buckets, strict=True):
        if buckets.count(bucket) > 1:
            raise RequestError(
                f"data.streams lists {stream.root}/{stream.bucket} twice. List it once, with a higher weight."
            )
        cache = config.cache_for(stream)
        if cache is None:
            if isinstance(stream.root, str):
                raise RequestError(
                    f"The latents root {stream.root} is remote, so data.cache must be set to a local folder for copies "
                    f"of its files."
                )
            continue
        folder = cache.resolve()
        for root in roots:
            if folder == root or folder in root.parents or root in folder.parents:
                raise RequestError(
                    f"data.cache {cache} overlaps with the latents root {root}. The cache deletes files, so set "
                    f"data.cache to a folder outside the root."
                )
        Cache(cache, config.cache_limit).check()


def _open_stream(data: DataConfig, stream: StreamConfig, found: FoundStream, global_batch_size: int) -> OpenStream:
    """Open a stream.

    Raises:
        RequestError: its index is missing, it has too few samples, or `data.cache_limit` is too small for its files.
    """
    store, folder = open_store(stream.root), node_folder(data.cache_for(stream))
    files = map_index(store, stream.bucket, found, folder)
    bounds = stream.filter or data.filter
    selection = _map_selection(store, stream.bucket, files, bounds, found, folder)
    num_samples = files.num_samples if selection is None else int(selection.counts.sum())
    chosen = choose_per_epoch(stream.weight, num_samples, global_batch_size)
    if not chosen:
        remain = f"remain{'s' * (num_samples == 1)}"
        passing = "" if selection is None else f", of which {num_samples} {remain}. {selection.explain()}"
        loosen = "loosen the filter, " if bounds and bounds.bounds else ""
        begin = f"{store.where(stream.bucket)} has {counted(files.num_samples, 'sample')}{passing}."
        if not num_samples:
            raise RequestError(
                f"{begin} The stream has nothing to train on. Encode more shards{f', {loosen}' if loosen else ' '}or "
                f"remove the stream."
            )
        raise RequestError(
            f"{begin} With weight {stream.weight:g}, the stream does not fill one global batch of "
            f"{global_batch_size}. Encode more shards, {loosen}raise the stream's weight, or lower global_batch_size."
        )
    largest = int(files.sizes.max())
    if data.cache_for(stream) and data.cache_limit is not None and data.cache_limit < 2 * largest:
        raise RequestError(
            f"data.cache_limit {data.cache_limit} is too small for two files of {store.where(stream.bucket)}, which "
            f"are up to {largest} bytes each. Set data.cache_limit to at least {2 * largest}."
        )
    recalled = np.isin(files.parts["name"], [name.encode() for name in found.recalled])
    return OpenStream(
        config=stream,
        found=found,
        store=store,
        latent_hw=Bucket.parse(stream.bucket).latent_hw(found.encoding.image.downsampling),
        files=files,
        selection=selection,
        num_samples=num_samples,
        chosen=chosen,
        recalled=int(files.parts["samples"][recalled].sum()),
    )


def map_index(store: Store, bucket: str, found: FoundStream, folder: Path) -> MdsIndex:
    """Return a bucket's file list, memory-mapped so that all processes on the machine share it.

    Raises:
        RequestError: the index is missing, or was not written by stage 1.
    """
    columns = tuple(index_columns(found.encoding, bucket))

    def make(target: Path) -> None:
        save_arrays(load_rows(store, found.index, read_index(store, bucket, found.index)), target)
        pa.default_memory_pool().release_unused()  # otherwise this process would use more memory than the others

    return MdsIndex.mapped(once_per_node(folder, f"{bucket}.{found.index}", make), columns)


def _map_selection(
    store: Store, bucket: str, files: MdsIndex, config: FilterConfig | None, found: FoundStream, folder: Path
) -> Selection | None:
    """Return the selection of samples to train on, computed once per machine, or None if all samples are used.

    Raises:
        RequestError: the filter uses scores that the root does not store.
    """
    config = config or FilterConfig()
    if not config.bounds and not found.exclusions:
        return None
    stored = ["width", "height", *found.encoding.scores]
    if missing := [name for name in config.bounds if name not in stored]:
        raise RequestError(
            f"The filter uses {', '.join(missing)}, but {store.where()} stores only {', '.join(stored)}. Filter "
            f"only by these, or encode a root with the missing scores."
        )
    identity = json.dumps([found.index, config.model_dump(mode="json"), found.exclusions])
    key = hashlib.sha256(identity.encode()).hexdigest()

    def make(target: Path) -> None:
        excluded = [load_exclusion(store, id) for id in found.exclusions]
        select(store, bucket, files, config, excluded).save(target)

    return Selection.mapped(once_per_node(folder, f"{bucket}.{key}", make))


def diagnose_storage(spec: DataSpec) -> str:
    """Return a probable reason why no batches arrive: a missing or truncated local file, or hung storage."""
    problems = (check_sizes(stream.store, stream.config.bucket, stream.files) for stream in spec.streams)
    intact = "All local files exist and have the right size, and no damage was found, so the storage may have stalled."
    return next(filter(None, problems), intact)
