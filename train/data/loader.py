"""Latents roots → global batches, in one order that depends on neither ranks nor workers.

`open_data` finds the streams, and checks that they mean the same, fit together, and are all there. A loader process
then asks `order.py` which samples its rank's share of a step is, `files.py` for their bytes, and stacks them.
Whatever goes wrong on the way reaches the training process as one error.
"""

import copy
import hashlib
import itertools
import os
import signal
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from shards.base.errors import RequestError, WorkError
from shards.base.store import LocalStore, Store
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.mds import MdsFiles, parse_index
from shards.open import open_store
from shards.root.shared import load_uncond
from train.config import DataConfig, StreamConfig
from train.data.batch import Batch, Collate
from train.data.cache import Cache
from train.data.files import BucketFiles, Files
from train.data.order import Order, StreamOrder
from train.data.selection import Selection, select
from train.data.watchdog import Watchdog, diagnose, end_process

GRACE_SECONDS = 120
"""How long a loader's process outlives a SIGTERM."""
STEPS_AHEAD = 4
"""How many of its own batches ahead a loader process has files fetched and hashed."""
NUM_STAT_THREADS = 32


@dataclass(frozen=True)
class DataSpec:
    """What the stored numbers mean, and what an epoch of them is."""

    posterior: Literal["moments", "mean"]
    latent_channels: int
    scaling_factor: float
    text_length: int
    text_width: int
    trim: bool
    uncond: Tensor
    """(tokens, width) float16: the empty caption's text latents."""
    uncond_tokens: int
    streams: tuple["OpenStream", ...]
    steps_per_epoch: int


@dataclass(frozen=True)
class OpenStream:
    """A stream whose files were found, and how many of its samples make an epoch."""

    config: StreamConfig
    store: Store
    latent_hw: tuple[int, int]
    files: MdsFiles
    selection: Selection | None
    """None: no filter, all samples."""
    num_samples: int
    """That pass the filter."""
    chosen: int
    index_sha256: str
    encoding_id: str


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
    uncond, uncond_tokens = load_uncond(stores[0])
    return DataSpec(
        posterior=first.image.posterior,
        latent_channels=first.image.latent_channels,
        scaling_factor=first.image.scaling_factor,
        text_length=first.text.length,
        text_width=first.text.width,
        trim=first.text.trim,
        uncond=uncond,
        uncond_tokens=uncond_tokens,
        streams=streams,
        steps_per_epoch=sum(stream.chosen for stream in streams) // global_batch_size,
    )


def check_places(config: DataConfig) -> None:
    """Each bucket once; a cache for what is remote, and never in a root's way.

    Raises:
        RequestError: what is wrong, and where.
    """
    places = [(_resolved(stream.root), stream.bucket) for stream in config.streams]
    roots = [place for place, _ in places if isinstance(place, Path)]
    for stream, place in zip(config.streams, places, strict=True):
        if places.count(place) > 1:
            raise RequestError(f"data.streams names {stream.root}/{stream.bucket} twice; raise its weight instead.")
        cache = cache_folder(config, stream)
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


def cache_folder(config: DataConfig, stream: StreamConfig) -> Path | None:
    """Where a stream's files are copied to; None: they are read in place."""
    return stream.cache or config.cache


def choose_per_epoch(weight: float, num_samples: int, global_batch_size: int) -> int:
    """Samples of a stream in one epoch: weight × n, rounded down to whole global batches."""
    # of the weight as it was written: 0.29 × 100 is 29, and in floats 28.999…
    return int(Fraction(str(weight)) * num_samples) // global_batch_size * global_batch_size


def encoding_differences(a: EncodingRecord, b: EncodingRecord) -> list[str]:
    """Fields that differ and change what the numbers mean, as `field: here ≠ there`."""
    # Crop, resampling, decoder, dtype and the captions' sources may differ: they change which pictures and which
    # captions there are, not what the numbers mean.
    image = ("image.crop", "image.resampl", "image.decoder", "image.color")
    irrelevant = (*image, "text.captions", "text.max_characters", "compute_dtype", "schema_version")
    return [difference for difference in a.differences(b) if not difference.startswith(irrelevant)]


class Steps(Sampler[int]):
    """The steps of a run from one on, without end: a loader asks for batches by these."""

    def __init__(self, first: int):
        self.first = first

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.first)


@dataclass(frozen=True)
class Failure:
    """What a loader process hands over in place of a batch."""

    message: str


class GlobalBatches(Dataset[Batch | Failure]):
    """One rank's share of the global batch of any step."""

    def __init__(self, order: Order, files: Files, slots: Tensor, collate: Collate):
        self.order = order
        self.files = files
        # a copy: sending a batch moves the tensor's memory
        self.slots = slots.numpy().copy()
        self.collate = collate
        self.announced = -1
        """The last step whose files this process made ready, or has threads make ready."""

    def __getitem__(self, step: int) -> Batch | Failure:
        worker = get_worker_info()
        stride = worker.num_workers if worker else 1
        try:
            first = self.announced + stride if self.announced >= step else step
            for ahead in range(first, step + STEPS_AHEAD * stride + 1, stride):
                files, _ = self.order.samples(ahead, self.slots)
                self.files.announce(np.unique(files).tolist())
                self.announced = ahead
            files, rows = self.order.samples(step, self.slots)
            pairs = zip(files.tolist(), rows.tolist(), strict=True)
            return self.collate([self.files.sample(file, row) for file, row in pairs])
        except (WorkError, RequestError) as error:
            return Failure(str(error))


def make_order(config: DataConfig, spec: DataSpec, global_batch_size: int, seed: int) -> Order:
    """The order of samples of a whole run; streams of one latent shape share their global batches."""
    groups: dict[tuple[int, int], list[StreamOrder]] = {}
    first_file = 0
    for stream in spec.streams:
        files, selection = stream.files, stream.selection
        groups.setdefault(stream.latent_hw, []).append(
            StreamOrder(
                first_file=first_file,
                counts=files.samples if selection is None else selection.counts,
                starts=files.samples.cumsum() - files.samples,
                mask=None if selection is None else selection.mask,
                chosen=stream.chosen,
            )
        )
        first_file += len(files)
    nodes = config.num_canonical_nodes
    return Order(list(groups.values()), global_batch_size, nodes, config.shuffle_block, seed, config.shuffle)


def make_files(config: DataConfig, spec: DataSpec) -> Files:
    """Every stream's files, in `make_order`'s numbering."""
    buckets = []
    for stream in spec.streams:
        folder = cache_folder(config, stream.config)
        cache = None if folder is None else Cache(folder, config.cache_limit)
        prefix = hashlib.sha256(str(_resolved(stream.config.root)).encode()).hexdigest()[:16]
        buckets.append(BucketFiles(stream.store, stream.config.bucket, stream.files, cache, prefix))
    return Files(buckets)


def make_loader(
    config: DataConfig, spec: DataSpec, global_batch_size: int, seed: int, step: int, slots: Tensor
) -> DataLoader[Any]:
    """The loader of this rank, standing before global batch number `step` of the whole run.

    Args:
        slots: (n,) this rank's places in the global batch; n is its share of it.
        step: how many global batches of the run are behind it; nothing of them is planned again, and no loader state is
            ever saved.
    """
    collate = Collate(slots, spec.text_length)
    order = make_order(config, spec, global_batch_size, seed)
    return DataLoader(
        GlobalBatches(order, make_files(config, spec), slots, collate),
        sampler=Steps(step),
        batch_size=None,
        collate_fn=as_it_is,
        num_workers=config.num_workers,
        timeout=config.first_timeout if config.num_workers else 0,  # `global_batches` lowers it
        persistent_workers=config.num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=start_worker,
        prefetch_factor=4 if config.num_workers else None,
    )


def global_batches(
    loader: DataLoader[Any], spec: DataSpec, step: int, config: DataConfig | None = None
) -> Generator[Batch, None, None]:
    """Endless batches from `step` on, epoch after epoch.

    Args:
        config: says how long to wait. A loader without processes of its own ends this one then; without a `config` it
            never does.

    Raises:
        WorkError: no batch came in time, or not the right one: a file is missing or damaged, or storage stalls.
    """
    watchdog = None if loader.num_workers or config is None else Watchdog(lambda: _what_is_wrong(spec))
    batches: Any = iter(loader)
    patience, num_batches = config.first_timeout if config else 0.0, 0
    try:
        while True:
            try:
                with watchdog.watching(patience) if watchdog else nullcontext():
                    batch = next(batches)
            except Exception as error:  # whatever a worker raised, or the loader's own time-out
                found = diagnose(lambda: _what_is_wrong(spec))
                if found is None:  # the exit would wait for threads that look at storage which does not answer
                    kill_workers(loader)
                    end_process(f"The loader failed after {step} steps: {error}. Storage does not answer.")
                raise WorkError(f"The loader failed after {step} steps: {error}. {found}") from error
            if isinstance(batch, Failure):
                raise WorkError(f"The loader failed after {step} steps: {batch.message}")
            num_batches += 1
            if config is not None and num_batches >= loader.num_workers:  # each loader process has a first one
                batches._timeout = patience = config.timeout
            yield batch
            step += 1
    finally:
        kill_workers(loader)  # they may be stuck, or fetching what nobody will read


def start_worker(worker: int) -> None:
    """A scheduler signals every process: the trainer saves and leaves, and needs its loader for some steps until then.

    SIGTERM is also how a process that exits ends its loader's workers, so it still ends them, but later.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE_SECONDS))
    info = get_worker_info()
    assert info is not None
    for bucket in info.dataset.files.buckets:  # type: ignore[attr-defined]
        bucket.store = copy.copy(bucket.store)  # connections do not survive a fork


def kill_workers(loader: DataLoader[Any]) -> None:
    """End the loader's processes at once, stuck ones too: the exit of this process would wait for them."""
    iterator: Any = loader._iterator
    if iterator is None:
        return
    if getattr(iterator, "_worker_pids_set", False):  # or torch takes their end for a crash of theirs
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    for process in getattr(iterator, "_workers", ()):
        process.kill()
    # torch's own way of ending them, when the iterator goes, takes a lock that a killed one may hold for ever
    iterator._shutdown = True
    if hasattr(iterator, "_pin_memory_thread_done_event"):
        iterator._pin_memory_thread_done_event.set()


def as_it_is(batch: Any) -> Any:
    """A batch is stacked where its samples are read."""
    return batch


def _resolved(root: Path | str) -> Path | str:
    return root.resolve() if isinstance(root, Path) else root


def _what_is_wrong(spec: DataSpec) -> str:
    for stream in spec.streams:
        try:
            check_sizes(stream.store, stream.config.bucket, stream.files)
        except (RequestError, OSError) as error:
            return str(error)
    return "Every local file is there with its size, and none was found damaged: storage may stall."


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
    if len(files) and columns != encoding.columns(Bucket.parse(stream.bucket)):
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
    if cache_folder(data, stream) and data.cache_limit is not None and data.cache_limit < 2 * largest:
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


def check_sizes(store: Store, bucket: str, files: MdsFiles) -> None:
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
