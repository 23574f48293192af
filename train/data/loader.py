"""Global batches, in one order that depends on neither ranks nor workers.

A loader process asks `order.py` which samples its rank's share of a step is, `files.py` for their bytes, and stacks
them. Whatever goes wrong on the way reaches the training process as one error.
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
from train.data.streams import resolved, what_is_wrong
from train.data.watchdog import Watchdog, diagnose, end_process

GRACE_SECONDS = 120
"""How long a loader's process outlives a SIGTERM."""
MOST_AHEAD = 4
"""Batches that each loader process may have made, or be at, before they are asked for."""
STEPS_AHEAD = 4
"""How many of its own batches ahead a loader process has files fetched and hashed."""


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

    def __init__(self, order: Order, files: SampleReader, slots: Tensor, collate: Collate):
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


def make_files(config: DataConfig, spec: DataSpec) -> SampleReader:
    """Every stream's files, in `make_order`'s numbering."""
    buckets = []
    for stream in spec.streams:
        folder = config.cache_of(stream.config)
        cache = None if folder is None else Cache(folder, config.cache_limit)
        prefix = hashlib.sha256(str(resolved(stream.config.root)).encode()).hexdigest()[:16]
        buckets.append(StreamFiles(stream.store, stream.config.bucket, stream.files, cache, prefix))
    return SampleReader(buckets)


def make_ahead(batch_bytes: int, config: DataConfig) -> tuple[int, int | None]:
    """Loader processes, and how many batches each makes ahead, of which `data.prefetch_gb` holds all.

    W processes with F batches each hold W·F of them, W times what a batch is made of, the one that is in use, and the
    one that is being page-locked.
    """
    if not config.num_workers:
        return 0, None
    room = int(config.prefetch_gb * 1e9 / batch_bytes) - 2
    workers = max(1, min(config.num_workers, room // 2))
    return workers, max(1, min(MOST_AHEAD, room // workers - 1))


class Loader:
    """One rank's share of the global batches from a step on, epoch after epoch, without end.

    All that is private to torch's DataLoader and is touched here, is touched in this class.
    """

    def __init__(
        self, config: DataConfig, spec: DataSpec, global_batch_size: int, seed: int, step: int, slots: Tensor
    ) -> None:
        """Stands before global batch number `step` of the whole run; nothing before it is planned again.

        Args:
            step: how many global batches of the run are behind it. No loader state is ever saved.
            slots: (n,) this rank's places in the global batch; n is its share of it.
        """
        batch_bytes = len(slots) * max(spec.sample_bytes(stream.config.bucket) for stream in spec.streams)
        self.num_workers, factor = make_ahead(batch_bytes, config)
        self.num_first = max(1, self.num_workers)
        """Batches that may take `first_timeout`: the first of each loader process."""
        order, files = make_order(config, spec, global_batch_size, seed), make_files(config, spec)
        self.config, self.spec, self.step = config, spec, step
        self.loader = DataLoader(
            GlobalBatches(order, files, slots, Collate(slots, spec.lengths)),
            sampler=Steps(step),
            batch_size=None,
            collate_fn=as_it_is,
            num_workers=self.num_workers,
            timeout=config.first_timeout if self.num_workers else 0,
            persistent_workers=self.num_workers > 0,
            pin_memory=has_accelerator(),
            worker_init_fn=start_worker,
            prefetch_factor=factor,
        )

    def __iter__(self) -> Generator[Batch, None, None]:
        """Endless batches; closing the iterator ends the loader processes.

        Raises:
            WorkError: no batch came in time, or not the right one: a file is missing or damaged, or storage stalls.
        """
        # without processes of its own this one waits, and nothing but its end can interrupt it
        watchdog = None if self.num_workers else Watchdog(lambda: what_is_wrong(self.spec))
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
            self._kill(batches)  # they may be stuck, or fetching what nobody will read

    def _next(self, batches: Any) -> Batch:
        failed = f"The loader failed after {self.step} steps"
        try:
            batch = next(batches)
        except Exception as error:  # whatever a loader process raised, or torch's own time-out
            found = diagnose(lambda: what_is_wrong(self.spec))
            if found is None:  # the exit would wait for threads that look at storage which does not answer
                self._kill(batches)
                end_process(f"{failed}: {error}. Storage does not answer.")
            raise WorkError(f"{failed}: {error}. {found}") from error
        if isinstance(batch, Failure):
            raise WorkError(f"{failed}: {batch.message}")
        if self.spec.look is not None and self.spec.look.problem:
            raise WorkError(f"{failed}: {self.spec.look.problem}")
        return batch

    @staticmethod
    def _kill(batches: Any) -> None:
        """End the loader processes at once, stuck ones too: the exit of this process would wait for them."""
        if getattr(batches, "_worker_pids_set", False):  # or torch takes their end for a crash of theirs
            torch._C._remove_worker_pids(id(batches))
            batches._worker_pids_set = False
        for process in getattr(batches, "_workers", ()):
            process.kill()
        # torch's own way of ending them, when the iterator goes, takes a lock that a killed one may hold for ever
        batches._shutdown = True
        if hasattr(batches, "_pin_memory_thread_done_event"):
            batches._pin_memory_thread_done_event.set()


def start_worker(worker: int) -> None:
    """A scheduler signals every process: the trainer saves and leaves, and needs its loader for some steps until then.

    SIGTERM is also how a process that exits ends its loader's workers, so it still ends them, but later.
    """
    # a bar may have taken their place, with a lock that nobody in this process lets go of
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches every process of its group
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE_SECONDS))
    info = get_worker_info()
    assert info is not None
    for bucket in info.dataset.files.buckets:  # type: ignore[attr-defined]
        bucket.store = copy.copy(bucket.store)  # connections do not survive a fork


def as_it_is(batch: Any) -> Any:
    """A batch is stacked where its samples are read."""
    return batch
