"""Latents roots → streams: found, held against each other, and every file of them looked at, before a run begins."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shards.base.errors import RequestError
from shards.base.store import LocalStore, Store
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.mds import MdsIndex, parse_index
from shards.format.towers import FeatureTower, TextTower
from shards.open import open_store
from shards.root.shared import load_uncond
from train.data.cache import Cache
from train.data.order import choose_per_epoch
from train.data.selection import select
from train.data.spec import DataConfig, DataSpec, OpenStream, StreamConfig, encoding_differences

NUM_STAT_THREADS = 32


def open_data(config: DataConfig, global_batch_size: int) -> DataSpec:
    """Find and check every stream.

    Raises:
        RequestError: a root, bucket or file is missing, a bucket or what a filter leaves of it is less than a global
            batch, two streams' encodings do not mean the same, or a cache would endanger a root.
    """
    check_places(config)
    stores = [open_store(stream.root) for stream in config.streams]
    encodings = [EncodingRecord.load(store) for store in stores]
    first = encodings[0]
    for stream, encoding in zip(config.streams[1:], encodings[1:], strict=True):
        differences = encoding_differences(first, encoding)
        if differences:
            raise RequestError(
                f"The roots {config.streams[0].root} and {stream.root} cannot be mixed: {'; '.join(differences)}."
            )
    streams = tuple(
        _open_stream(config, stream, store, encoding, global_batch_size)
        for stream, store, encoding in zip(config.streams, stores, encodings, strict=True)
    )
    texts, features = chosen_towers(config, first)
    return DataSpec(
        image=first.image,
        texts=texts,
        features=features,
        uncond=load_uncond(stores[0]),
        streams=streams,
        steps_per_epoch=sum(stream.chosen for stream in streams) // global_batch_size,
    )


def chosen_towers(config: DataConfig, encoding: EncodingRecord) -> tuple[dict[str, TextTower], dict[str, FeatureTower]]:
    """The text and feature towers that are read.

    Raises:
        RequestError: one of `data.towers` is not in the root, or none of them is a text tower.
    """
    texts = {f"texts.{name}": name for name in encoding.texts}
    features = {f"features.{name}": name for name in encoding.features}
    asked = [*texts, *features] if config.towers is None else config.towers
    if missing := [tower for tower in asked if tower not in texts and tower not in features]:
        raise RequestError(
            f"data.towers asks for {', '.join(missing)}, which {config.streams[0].root} does not have; it has "
            f"{', '.join([*texts, *features])}. Ask for these, or encode a root with that tower."
        )
    return (
        {name: encoding.texts[name] for tower, name in texts.items() if tower in asked},
        {name: encoding.features[name] for tower, name in features.items() if tower in asked},
    )


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


def _open_stream(
    data: DataConfig, stream: StreamConfig, store: Store, encoding: EncodingRecord, global_batch_size: int
) -> OpenStream:
    name = f"{stream.bucket}/index.json"
    try:
        index = store.read(name)
    except FileNotFoundError:
        names = [f"{entry}/index.json" for entry in store.entries()]
        present = ", ".join(entry.partition("/")[0] for entry in names if store.size(entry) is not None) or "none"
        raise RequestError(
            f"The latents root {stream.root} has no bucket {stream.bucket} (it has: {present}). Add it to `buckets` of "
            f"the precompute config and run `make precompute` again; only that bucket is encoded then."
        ) from None
    files = parse_index(index, store.where(name))
    columns = {column.name: column.encoding for column in files.columns}
    if len(files) and columns != encoding.stored_columns(Bucket.parse(stream.bucket)):
        raise RequestError(f"{store.where(name)} lists the columns {columns}, which encoding.json does not give.")
    check_sizes(store, stream.bucket, files)
    config = stream.filter or data.filter
    selection = select(store, stream.bucket, files, config) if config is not None and config.bounds else None
    num_samples = files.num_samples if selection is None else int(selection.counts.sum())
    chosen = choose_per_epoch(stream.weight, num_samples, global_batch_size)
    if not chosen:
        passing = "" if selection is None else f", of which {num_samples} pass its filter ({selection.explain()})"
        raise RequestError(
            f"{store.where(stream.bucket)} holds {files.num_samples} samples{passing}; {stream.weight:g} passes over "
            f"them do not fill one global batch of {global_batch_size}. Encode more shards, "
            f"{'loosen the filter, ' if selection else ''}raise the stream's weight, or lower global_batch_size."
        )
    largest = int(files.sizes.max())
    if data.cache_of(stream) and data.cache_limit is not None and data.cache_limit < 2 * largest:
        raise RequestError(
            f"data.cache_limit {data.cache_limit} is less than two files of {store.where(stream.bucket)} ({largest} "
            f"bytes each at most). Raise it."
        )
    return OpenStream(
        config=stream,
        store=store,
        latent_hw=Bucket.parse(stream.bucket).latent_hw(encoding.image.downsampling),
        files=files,
        selection=selection,
        num_samples=num_samples,
        chosen=chosen,
        index_sha256=hashlib.sha256(index).hexdigest(),
        encoding_id=encoding.id,
    )


def what_is_wrong(spec: DataSpec) -> str:
    """Of a run that gets no more batches: the first local file that is not as its index says, or that none is."""
    for stream in spec.streams:
        try:
            check_sizes(stream.store, stream.config.bucket, stream.files)
        except (RequestError, OSError) as error:
            return str(error)
    return "Every local file is there with its size, and none was found damaged: storage may stall."


def check_sizes(store: Store, bucket: str, files: MdsIndex) -> None:
    """Hold the size of every local file against the index, many at once. Remote ones are checked when they come.

    Raises:
        RequestError: the first file that is missing or has another size.
    """
    if not isinstance(store, LocalStore):
        return
    top = store.where(bucket)

    def check(block: Sequence[int]) -> str | None:
        for index in block:
            path = os.path.join(top, files.name(index))
            try:
                size = os.stat(path).st_size
            except FileNotFoundError:
                size = -1
            if size != files.sizes[index]:
                found = "no file" if size < 0 else f"{size} bytes"
                return (
                    f"{path}: {found}, but the index says {files.sizes[index]} bytes. Restore the file from its copy."
                )
        return None

    blocks = [range(start, min(start + 1000, len(files))) for start in range(0, len(files), 1000)]
    with ThreadPoolExecutor(NUM_STAT_THREADS) as threads:
        for problem in threads.map(check, blocks):
            if problem:
                raise RequestError(problem)


def resolved(root: Path | str) -> Path | str:
    """A root's place, by which two names of one folder are told to be the same."""
    return root.resolve() if isinstance(root, Path) else root
