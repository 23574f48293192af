"""Latents roots → streams: found, held against each other, and every file of them looked at, before a run begins.

`find_data` asks the roots what may change: which index and which exclusions are the newest. One process of a run does.
`open_data` does the rest, on each; what it reads is named by content, so machines and restarts read the same. Of the
processes of a machine, one reads it, and the others map what that one made (`node.py`).
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
from shards.base.store import Store
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
from train.data.node import Look, check_sizes, node_folder, once_per_node
from train.data.order import choose_per_epoch
from train.data.selection import FilterConfig, Selection, select
from train.data.spec import DataConfig, DataSpec, OpenStream, StreamConfig, encoding_differences, only_read

LOOK_SECONDS = 10.0
"""For so long a run waits before its first step for the look at its local files; what is found later ends it."""


@dataclass(frozen=True)
class FoundStream:
    """What was found of a stream, beside what its index says."""

    encoding: EncodingRecord
    index: str
    """Id of the index that the run is pinned to."""
    exclusions: tuple[str, ...]
    recalled: frozenset[str]
    """Parts of its bucket that were recalled by now, as `part_name` has them."""


@dataclass(frozen=True)
class Found:
    """What one process of a run asked of the roots."""

    streams: tuple[FoundStream, ...]
    uncond: dict[str, TextLatents]


def find_data(config: DataConfig, pins: Sequence[Mapping[str, Any]] = ()) -> Found:
    """Ask each root which index a stream has, unless that is pinned.

    Args:
        pins: the streams of an earlier checkpoint's fingerprint; those of the same buckets hold, where
            `config.index` says so.

    Raises:
        RequestError: a root or bucket is missing, two streams' encodings do not mean the same, or a cache would
            endanger a root.
    """
    check_places(config)
    streams = []
    for number, stream in enumerate(config.streams):
        pin = pins[number] if number < len(pins) and config.index == "pinned" else {}
        streams.append(find_stream(open_store(stream.root), stream.bucket, pin))
    first = streams[0].encoding
    for stream, found in zip(config.streams[1:], streams[1:], strict=True):
        differences = encoding_differences(*(only_read(e, config.towers) for e in (first, found.encoding)))
        if differences:
            raise RequestError(
                f"The roots {config.streams[0].root} and {stream.root} cannot be mixed: {'; '.join(differences)}."
            )
    return Found(tuple(streams), load_uncond(open_store(config.streams[0].root)))


def find_stream(store: Store, bucket: str, pin: Mapping[str, Any]) -> FoundStream:
    """Find the index and the exclusions of a bucket: the pinned ones if `pin` is for this bucket, else the newest.

    Args:
        pin: `bucket`, `index_sha256` and `exclusions` from a checkpoint's fingerprint; empty: nothing is pinned.

    Raises:
        RequestError: there is no such root, bucket or index.
    """
    if pin.get("bucket") != bucket:
        pin = {}
    encoding, manifest = EncodingRecord.load(store), newest_manifest(store)
    index = pin.get("index_sha256") or newest_index(store, bucket)
    read_index(store, bucket, index)  # every machine needs it, so all of them fail here if it is missing
    return FoundStream(
        encoding=encoding,
        index=index,
        exclusions=tuple(pin.get("exclusions", ()) if pin else exclusion_ids(store)),
        recalled=frozenset(manifest.recalled.get(bucket, ()) if manifest else ()),
    )


def newest_index(store: Store, bucket: str) -> str:
    """Id of the newest index of a bucket.

    Raises:
        RequestError: the root has no such bucket, or none that was published.
    """
    found = current_ids(store)
    if bucket in found:
        return found[bucket]
    present = ", ".join(sorted(found)) or "none"
    raise RequestError(
        f"The latents root {store.where()} has no bucket {bucket} (it has: {present}). Add it to `buckets` of "
        f"the precompute config and run `make precompute` again; only that bucket is encoded then. (If a job that was "
        f"killed had encoded it, `python -m shards index {store.where()}` publishes what is committed.)"
    )


def open_data(config: DataConfig, global_batch_size: int, found: Found | None = None) -> DataSpec:
    """Open and check every stream.

    Args:
        found: `find_data`'s, of one process for all of a run; None: this process asks for itself.

    Raises:
        RequestError: an index is missing, or a bucket or what a filter leaves of it is less than a global batch.
    """
    found = found or find_data(config)
    streams = tuple(
        _open_stream(config, stream, theirs, global_batch_size)
        for stream, theirs in zip(config.streams, found.streams, strict=True)
    )
    looks = int(os.environ.get("LOCAL_RANK", "0")) == 0
    look = Look([(stream.store, stream.config.bucket, stream.files) for stream in streams]) if looks else None
    if look is not None:
        look.wait(LOOK_SECONDS)
    read = chosen_towers(config, found.streams[0].encoding)
    return DataSpec(
        image=read.image,
        texts=read.texts,
        features=read.features,
        uncond=found.uncond,
        streams=streams,
        steps_per_epoch=sum(stream.chosen for stream in streams) // global_batch_size,
        num_captions=max(len(theirs.encoding.captions) for theirs in found.streams),
        look=look,
    )


def chosen_towers(config: DataConfig, encoding: EncodingRecord) -> EncodingRecord:
    """The record with the text and feature towers that are read.

    Raises:
        RequestError: one of `data.towers` is not in the root.
    """
    present = [*(f"texts.{name}" for name in encoding.texts), *(f"features.{name}" for name in encoding.features)]
    if missing := [tower for tower in config.towers or () if tower not in present]:
        raise RequestError(
            f"data.towers asks for {', '.join(missing)}, which {config.streams[0].root} does not have; it has "
            f"{', '.join(present)}. Ask for these, or encode a root with that tower."
        )
    return only_read(encoding, config.towers)


def check_places(config: DataConfig) -> None:
    """Each bucket once; a cache for what is remote, and never in a root's way.

    Raises:
        RequestError: what is wrong, and where.
    """
    places = [(resolved(stream.root), stream.bucket) for stream in config.streams]
    roots = [place for place, _ in places if isinstance(place, Path)]
    for stream, place in zip(config.streams, places, strict=True):
        if places.count(place) > 1:
            raise RequestError(f"data.streams names {stream.root}/{stream.bucket} twice; raise its weight instead.")
        cache = config.cache_of(stream)
        if cache is None:
            if not isinstance(place[0], Path):
                raise RequestError(
                    f"{stream.root} is remote: set data.cache to a local folder, in which copies of its files are read."
                )
            continue
        folder = cache.resolve()
        for root in roots:
            if folder == root or folder in root.parents or root in folder.parents:
                raise RequestError(
                    f"data.cache {cache} and the latents root {root} lie one in the other. Copies are removed from a "
                    f"cache; give it a folder of its own."
                )
        Cache(cache, config.cache_limit).check()


def _open_stream(data: DataConfig, stream: StreamConfig, found: FoundStream, global_batch_size: int) -> OpenStream:
    store, folder = open_store(stream.root), node_folder(data.cache_of(stream))
    files = map_index(store, stream.bucket, found, folder)
    bounds = stream.filter or data.filter
    selection = _map_selection(store, stream.bucket, files, bounds, found, folder)
    num_samples = files.num_samples if selection is None else int(selection.counts.sum())
    chosen = choose_per_epoch(stream.weight, num_samples, global_batch_size)
    if not chosen:
        passing = "" if selection is None else f", of which {num_samples} remain ({selection.explain()})"
        loosen = "loosen the filter, " if bounds and bounds.bounds else ""
        raise RequestError(
            f"{store.where(stream.bucket)} holds {files.num_samples} samples{passing}; {stream.weight:g} passes over "
            f"them do not fill one global batch of {global_batch_size}. Encode more shards, {loosen}raise the "
            f"stream's weight, or lower global_batch_size."
        )
    largest = int(files.sizes.max())
    if data.cache_of(stream) and data.cache_limit is not None and data.cache_limit < 2 * largest:
        raise RequestError(
            f"data.cache_limit {data.cache_limit} is less than two files of {store.where(stream.bucket)} ({largest} "
            f"bytes each at most). Raise it."
        )
    recalled = np.isin(files.parts["name"], [name.encode() for name in found.recalled])
    return OpenStream(
        config=stream,
        store=store,
        latent_hw=Bucket.parse(stream.bucket).latent_hw(found.encoding.image.downsampling),
        files=files,
        selection=selection,
        num_samples=num_samples,
        chosen=chosen,
        index_sha256=found.index,
        encoding_id=found.encoding.id,
        exclusions=found.exclusions,
        recalled=int(files.parts["samples"][recalled].sum()),
    )


def map_index(store: Store, bucket: str, found: FoundStream, folder: Path) -> MdsIndex:
    """A bucket's files, parsed once per machine.

    Raises:
        RequestError: the root has no such index, or it is not one that stage 1 wrote.
    """
    columns = tuple(index_columns(found.encoding, bucket))

    def make(target: Path) -> None:
        save_arrays(load_rows(store, found.index, read_index(store, bucket, found.index)), target)
        pa.default_memory_pool().release_unused()  # this process would keep what the others never had

    return MdsIndex.mapped(once_per_node(folder, f"{bucket}.{found.index}", make), columns)


def _map_selection(
    store: Store, bucket: str, files: MdsIndex, config: FilterConfig | None, found: FoundStream, folder: Path
) -> Selection | None:
    """The samples that pass, found once per machine; None: all."""
    config = config or FilterConfig()
    if not config.bounds and not found.exclusions:
        return None
    told = json.dumps([found.index, config.model_dump(mode="json"), found.exclusions])
    key = hashlib.sha256(told.encode()).hexdigest()

    def make(target: Path) -> None:
        excluded = [load_exclusion(store, id) for id in found.exclusions]
        select(store, bucket, files, config, excluded).save(target)

    return Selection.mapped(once_per_node(folder, f"{bucket}.{key}", make))


def what_is_wrong(spec: DataSpec) -> str:
    """Of a run that gets no more batches: the first local file that is not as its index says, or that none is."""
    found = (check_sizes(stream.store, stream.config.bucket, stream.files) for stream in spec.streams)
    sound = "Every local file is there with its size, and none was found damaged: storage may stall."
    return next(filter(None, found), sound)


def resolved(root: Path | str) -> Path | str:
    """A root's place, by which two names of one folder are told to be the same."""
    return root.resolve() if isinstance(root, Path) else root
