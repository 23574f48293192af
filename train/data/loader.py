"""Loading batches in an order that does not depend on the number of ranks or workers.

A loader worker looks up its rank's samples for a step in `order.py`, reads them through `files.py` and collates them.
If any of this fails, the training process raises a single error.
"""

import copy
import hashlib
import traceback
from collections.abc import Generator
from itertools import chain, repeat

import numpy as np
import torch
from torch import Tensor

from shards.base.device import is_accelerator
from shards.base.errors import RequestError, WorkError
from shards.base.store import resolved_place
from train.data.batch import Batch, Collate
from train.data.cache import Cache
from train.data.deadline import end_process, within
from train.data.files import SampleReader, StreamFiles
from train.data.order import Order, StreamOrder
from train.data.spec import DataConfig, DataSpec, column_lengths
from train.data.streams import diagnose_storage
from train.data.workers import LoaderWorkers, LoadFailure, WorkerDeath

MAX_PREFETCH = 4
"""Maximum number of batches that each loader worker prepares in advance."""
FILE_PREFETCH = 4
"""Number of upcoming batches for which a worker downloads and verifies files in advance."""
DIAGNOSIS_SECONDS = 10.0
"""Time in seconds to find out why no batch arrives."""


class GlobalBatches:
    """One rank's share of every global batch, by step."""

    def __init__(self, order: Order, files: SampleReader, slots: Tensor, collate: Collate, stride: int):
        """
        Args:
            stride: number of loader workers. Each loads every `stride`-th step.
        """
        self.order = order
        self.files = files
        self.slots = slots.numpy().copy()
        self.collate = collate
        self.stride = stride
        self.prefetched = -1
        """Last step whose files this process has started to prefetch."""

    def load(self, step: int) -> Batch | LoadFailure:
        """Read and collate the samples of `step`, and start to prefetch the files of later steps."""
        try:
            first = self.prefetched + self.stride if self.prefetched >= step else step
            for ahead in range(first, step + FILE_PREFETCH * self.stride + 1, self.stride):
                files, _ = self.order.samples(ahead, self.slots)
                self.files.prefetch(np.unique(files).tolist())
                self.prefetched = ahead
            files, rows = self.order.samples(step, self.slots)
            pairs = zip(files.tolist(), rows.tolist(), strict=True)
            return self.collate([self.files.sample(file, row) for file, row in pairs])
        except (WorkError, RequestError) as error:
            return LoadFailure(error)
        except Exception:
            return LoadFailure(f"\n{traceback.format_exc()}")

    def reconnect(self) -> None:
        """Replace all connections to stores, because they do not survive a fork."""
        for bucket in self.files.buckets:
            bucket.store = copy.copy(bucket.store)


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
        prefix = hashlib.sha256(resolved_place(stream.config.root).encode()).hexdigest()[:16]
        buckets.append(StreamFiles(stream.store, stream.config.bucket, stream.files, cache, prefix))
    return SampleReader(buckets)


def plan_prefetch(batch_bytes: int, config: DataConfig) -> tuple[int, int]:
    """Return the number of loader workers and their prefetch factor, such that all batches fit in `data.prefetch_gb`.

    With W workers and a factor of F, memory holds W·F prefetched batches, the samples of W batches that are being
    collated, one batch that is being copied to pinned memory, and the batch in use.
    """
    if not config.num_workers:
        return 0, 0
    room = int(config.prefetch_gb * 1e9 / batch_bytes) - 2
    workers = max(1, min(config.num_workers, room // 2))
    return workers, max(1, min(MAX_PREFETCH, room // workers - 1))


class Loader:
    """Endless iterable of one rank's share of the global batches, starting at any step."""

    def __init__(
        self,
        config: DataConfig,
        spec: DataSpec,
        global_batch_size: int,
        seed: int,
        step: int,
        slots: Tensor,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start at global batch number `step`, without computing or reading anything for earlier batches.

        Args:
            step: number of completed steps. This is the loader's entire state, so checkpoints store no other.
            slots: (n,) this rank's slots in the global batch, where n is the batch size per rank.
            device: device on which the batches will be used. For an accelerator, they are in pinned memory.
        """
        batch_bytes = len(slots) * max(spec.sample_bytes(stream.config.bucket) for stream in spec.streams)
        self.num_workers, self.ahead = plan_prefetch(batch_bytes, config)
        self.num_first = max(1, self.num_workers)
        """Number of batches to which `first_timeout` applies: each worker's first batch."""
        order, files = make_order(config, spec, global_batch_size, seed), make_files(config, spec)
        collate = Collate(slots, column_lengths(spec), shared=self.num_workers > 0)
        self.batches = GlobalBatches(order, files, slots, collate, stride=self.num_first)
        self.config, self.spec, self.step = config, spec, step
        self.pin_memory = is_accelerator(device)

    def __iter__(self) -> Generator[Batch, None, None]:
        """Yield batches endlessly. Closing the iterator kills the workers.

        Raises:
            WorkError: a file is missing or damaged, no batch arrived in time, or a worker died.
        """
        timeouts = chain(repeat(self.config.first_timeout, self.num_first), repeat(self.config.timeout))
        workers = LoaderWorkers(self.batches, self.num_workers, self.ahead, self.step) if self.num_workers else None
        try:
            for timeout in timeouts:
                batch = self._load(workers, timeout)
                yield batch.pin_memory() if self.pin_memory else batch
                self.step += 1
        finally:
            if workers is not None:
                workers.kill()

    def _load(self, workers: LoaderWorkers | None, timeout: float) -> Batch:
        """Return the batch of the current step, loaded by a worker or, if there are none, by this process.

        A batch that does not arrive within `timeout` seconds ends the process immediately if the storage does not
        respond, or if there are no workers that could be killed.

        Raises:
            WorkError: a file is missing or damaged, no worker's batch arrived in time, or a worker died.
        """
        batch: Batch | LoadFailure | None
        try:
            if workers is not None:
                batch = workers.get(self.step, timeout)
            elif (batch := within(timeout, lambda: self.batches.load(self.step))) is None:
                raise WorkError(f"No batch arrived within {timeout:g} s.")
        except WorkerDeath as error:
            batch = LoadFailure(error)
        except WorkError as error:
            found = within(DIAGNOSIS_SECONDS, lambda: diagnose_storage(self.spec))
            if found is None or workers is None:  # a normal exit would wait for threads that are blocked on storage
                if workers is not None:
                    workers.kill()
                end_process(f"{error} {found or 'The storage does not respond. Restore access to the storage.'}")
            batch = LoadFailure(f"{error} {found}")
        failed = f"The loader failed after step {self.step}"
        if isinstance(batch, LoadFailure):
            raise WorkError(f"{failed}: {batch}")
        if self.spec.size_check is not None and self.spec.size_check.problem:
            raise WorkError(f"{failed}: {self.spec.size_check.problem}")
        return batch
