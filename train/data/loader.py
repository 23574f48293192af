"""Loading batches in an order that does not depend on the number of ranks or workers.

A loader worker looks up its rank's samples for a step in `order.py`, reads them through `files.py` and collates them.
If any of this fails, the training process raises a single error.
"""

import copy
import hashlib
import itertools
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from shards.base.device import has_accelerator
from shards.base.errors import RequestError, WorkError
from train.data.batch import Batch, Collate
from train.data.cache import Cache
from train.data.files import SampleReader, StreamFiles
from train.data.order import Order, StreamOrder
from train.data.spec import DataConfig, DataSpec
from train.data.streams import diagnose_storage, resolve_root
from train.data.watchdog import Watchdog, diagnose, end_process

GRACE_SECONDS = 120
"""Seconds that a loader worker keeps running after SIGTERM."""
MAX_PREFETCH = 4
"""Maximum number of batches that each loader worker prepares in advance."""
FILE_PREFETCH = 4
"""Number of upcoming batches for which a worker downloads and verifies files in advance."""


class StepSampler(Sampler[int]):
    """Endless sequence of a run's steps, starting at `first`."""

    def __init__(self, first: int):
        self.first = first

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.first)


@dataclass(frozen=True)
class LoadFailure:
    """Error message that a loader worker returns instead of a batch."""

    message: str


class GlobalBatches(Dataset[Batch | LoadFailure]):
    """Dataset that maps a step to one rank's share of its global batch."""

    def __init__(self, order: Order, files: SampleReader, slots: Tensor, collate: Collate):
        self.order = order
        self.files = files
        # a copy, because sending a batch moves the tensor to shared memory
        self.slots = slots.numpy().copy()
        self.collate = collate
        self.prefetched = -1
        """Last step whose files this worker has started to prefetch."""

    def __getitem__(self, step: int) -> Batch | LoadFailure:
        worker = get_worker_info()
        stride = worker.num_workers if worker else 1
        try:
            first = self.prefetched + stride if self.prefetched >= step else step
            for ahead in range(first, step + FILE_PREFETCH * stride + 1, stride):
                files, _ = self.order.samples(ahead, self.slots)
                self.files.prefetch(np.unique(files).tolist())
                self.prefetched = ahead
            files, rows = self.order.samples(step, self.slots)
            pairs = zip(files.tolist(), rows.tolist(), strict=True)
            return self.collate([self.files.sample(file, row) for file, row in pairs])
        except (WorkError, RequestError) as error:
            return LoadFailure(str(error))


def make_order(config: DataConfig, spec: DataSpec, global_batch_size: int, seed: int) -> Order:
    """Build the order of a run's samples. Streams with the same latent shape share global batches."""
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


def make_files(config: DataConfig, spec: DataSpec) -> SampleReader:
    """Build the reader of all streams' files, numbered as in `make_order`."""
    buckets = []
    for stream in spec.streams:
        folder = config.cache_for(stream.config)
        cache = None if folder is None else Cache(folder, config.cache_limit)
        prefix = hashlib.sha256(str(resolve_root(stream.config.root)).encode()).hexdigest()[:16]
        buckets.append(StreamFiles(stream.store, stream.config.bucket, stream.files, cache, prefix))
    return SampleReader(buckets)


def plan_prefetch(batch_bytes: int, config: DataConfig) -> tuple[int, int | None]:
    """Return the number of loader workers and their prefetch factor, such that all batches fit in `data.prefetch_gb`.

    With W workers and a factor of F, memory holds W·F prefetched batches, the samples of W batches that are being
    collated, one batch that is being copied to pinned memory, and the batch in use.
    """
    if not config.num_workers:
        return 0, None
    room = int(config.prefetch_gb * 1e9 / batch_bytes) - 2
    workers = max(1, min(config.num_workers, room // 2))
    return workers, max(1, min(MAX_PREFETCH, room // workers - 1))


class Loader:
    """Endless iterable of one rank's share of the global batches, starting at any step.

    This is the only class that uses private attributes of torch's DataLoader.
    """

    def __init__(
        self, config: DataConfig, spec: DataSpec, global_batch_size: int, seed: int, step: int, slots: Tensor
    ) -> None:
        """Start at global batch number `step`, without computing or reading anything for earlier batches.

        Args:
            step: number of completed steps. This is the loader's entire state, so checkpoints store no other.
            slots: (n,) this rank's slots in the global batch, where n is the batch size per rank.
        """
        batch_bytes = len(slots) * max(spec.sample_bytes(stream.config.bucket) for stream in spec.streams)
        self.num_workers, factor = plan_prefetch(batch_bytes, config)
        self.num_first = max(1, self.num_workers)
        """Number of batches to which `first_timeout` applies: each worker's first batch."""
        order, files = make_order(config, spec, global_batch_size, seed), make_files(config, spec)
        self.config, self.spec, self.step = config, spec, step
        self.loader = DataLoader(
            GlobalBatches(order, files, slots, Collate(slots, spec.lengths)),
            sampler=StepSampler(step),
            batch_size=None,
            collate_fn=identity,
            num_workers=self.num_workers,
            timeout=config.first_timeout if self.num_workers else 0,
            persistent_workers=self.num_workers > 0,
            pin_memory=has_accelerator(),
            worker_init_fn=start_worker,
            prefetch_factor=factor,
        )

    def __iter__(self) -> Generator[Batch, None, None]:
        """Yield batches endlessly. Closing the iterator terminates the workers.

        Raises:
            WorkError: a file is missing or damaged, or no batch arrived in time.
        """
        # without workers, this process reads the files itself, and a hung read ends only when the process ends
        watchdog = None if self.num_workers else Watchdog(lambda: diagnose_storage(self.spec))
        batches, patience, num_batches = iter(self.loader), self.config.first_timeout, 0
        try:
            while True:
                with watchdog.watching(patience) if watchdog else nullcontext():
                    batch = self._next(batches)
                num_batches += 1
                if num_batches >= self.num_first:
                    patience = self.config.timeout
                    batches._timeout = patience
                yield batch
                self.step += 1
        finally:
            self._kill(batches)  # the workers may be stuck, or downloading files that nobody will read

    def _next(self, batches: Any) -> Batch:
        """Return the next batch.

        Raises:
            WorkError: a worker failed or timed out, or the size check has found a problem.
        """
        failed = f"The loader failed after step {self.step}"
        try:
            batch = next(batches)
        except Exception as error:  # any error in a worker, or the DataLoader's timeout
            found = diagnose(lambda: diagnose_storage(self.spec))
            if found is None:  # a normal exit would wait for threads that are blocked on storage
                self._kill(batches)
                end_process(f"{failed}: {error}. The storage does not respond. Restore access to the storage.")
            raise WorkError(f"{failed}: {error}. {found}") from error
        if isinstance(batch, LoadFailure):
            raise WorkError(f"{failed}: {batch.message}")
        if self.spec.size_check is not None and self.spec.size_check.problem:
            raise WorkError(f"{failed}: {self.spec.size_check.problem}")
        return batch

    @staticmethod
    def _kill(batches: Any) -> None:
        """Kill the workers, including stuck ones, because otherwise this process would wait for them when it exits."""
        if getattr(batches, "_worker_pids_set", False):  # otherwise torch reports their exit as a crash
            torch._C._remove_worker_pids(id(batches))
            batches._worker_pids_set = False
        for process in getattr(batches, "_workers", ()):
            process.kill()
        # skip torch's own shutdown, which takes a lock that a killed worker may hold forever
        batches._shutdown = True
        if hasattr(batches, "_pin_memory_thread_done_event"):
            batches._pin_memory_thread_done_event.set()


def start_worker(worker: int) -> None:
    """Initialize a loader worker: its signal handlers, output streams and connections.

    A scheduler signals every process of a job, but the trainer needs its loader until it has saved a checkpoint.
    SIGTERM therefore terminates a worker only after GRACE_SECONDS. It cannot be ignored altogether, because an exiting
    trainer uses it to end its workers.
    """
    # a progress bar may have replaced these streams, and the copy of its lock in this fork might never be released
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the whole process group
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE_SECONDS))
    info = get_worker_info()
    assert info is not None
    for bucket in info.dataset.files.buckets:  # type: ignore[attr-defined]
        bucket.store = copy.copy(bucket.store)  # connections do not survive a fork


def identity(batch: Any) -> Any:
    """Return the batch unchanged, because `GlobalBatches` has already collated it."""
    return batch
