"""The order of samples over all epochs: a pure function of seed, data and batch size, computed on demand.

An epoch takes `chosen` samples from every stream, where `chosen` is a multiple of the global batch size. Streams with
the same latent shape form a group, whose MDS files are shuffled and concatenated. The resulting sequence of samples is
split into C equal spans, one per **canonical node**. Each span is split into blocks, and the samples in each block are
shuffled. Slot s of a global batch takes the next sample from canonical node s mod C:

    files, shuffled      | 17 | 3 | 42 | 8 | 25 | 11 | 30 | 5 | …
    canonical nodes      |-------- 0 --------|-------- 1 --------| …
    blocks, shuffled     |--- 0 ---|--- 1 ---|- 0 -|--- 1 ---| 2 |      boundaries are staggered between nodes

A global batch therefore mixes C blocks from all over the data. A machine, however, loads only a few canonical nodes, so
it reads a bounded set of files at a time. Looking up a sample needs memory only for the list of files and the current
blocks. Nothing depends on the number of ranks or workers, or on the step from which a run resumes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 2
"""Incremented with every change to this file that affects the order. It is part of a run's fingerprint."""
Block = tuple[int, NDArray[np.int32], NDArray[np.int32]]
"""Position of the block's first sample within the node's span; each sample's file number; each sample's row."""
PASSES, ROWS, BLOCK, BATCHES = range(1, 5)
"""Purposes of draws; each has an independent random stream."""


@dataclass(frozen=True, eq=False)
class StreamOrder:
    """Samples of a stream, and the number of them that an epoch takes."""

    first_file: int
    """Index of the stream's first file among the files of all streams."""
    counts: NDArray[np.int64]
    """(files,) number of samples in each file that pass the stream's filter."""
    starts: NDArray[np.int64]
    """(files,) position of each file's first sample in the stream, counting samples that fail the filter as well."""
    mask: NDArray[np.uint8] | None
    """Packed bits, set for samples that pass the filter; None if all pass."""
    chosen: int
    """Number of samples per epoch."""

    def rows(self, file: int) -> NDArray[np.int64]:
        """Return the rows of a file that pass the filter, (counts[file],)."""
        if self.mask is None:
            return np.arange(self.counts[file])
        start = int(self.starts[file])
        stop = int(self.starts[file + 1]) if file + 1 < len(self.starts) else 8 * len(self.mask)
        bits = np.unpackbits(self.mask[start // 8 : -(-stop // 8)])
        return np.flatnonzero(bits[start % 8 : start % 8 + stop - start])


def choose_per_epoch(weight: float, num_samples: int, global_batch_size: int) -> int:
    """Return a stream's number of samples per epoch: weight × `num_samples`, rounded down to whole global batches."""
    # use the weight as written: 0.29 × 100 is 29, but 28.999… in floating point
    return int(Fraction(str(weight)) * num_samples) // global_batch_size * global_batch_size


def quotas(counts: NDArray[np.int64], wanted: int, start: int) -> NDArray[np.int64]:
    """Return how many of the `wanted` samples to take from each file, in proportion to `counts` and with an exact sum.

    This is systematic sampling: if `start` is uniform in [0, sum of counts), every sample is equally likely.
    """
    # Python integers, because products of sample counts in the billions overflow 64 bits
    ends = np.concatenate([[0], counts.cumsum()]).astype(object)
    return np.diff((wanted * ends + start) // int(counts.sum())).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Layout:
    """The concatenated files of one group in one epoch. A unit is one pass over one file."""

    files: NDArray[np.int64]
    """(units,) file numbers; a file occurs once for every pass over it."""
    streams: NDArray[np.int64]
    """(units,) number of each file's stream within the group."""
    partial: NDArray[np.bool_]
    """(units,) whether only some of the file's passing samples are taken."""
    ends: NDArray[np.int64]
    """(units,) position in the sequence at which each unit ends."""


class Order:
    """Lookup of the samples in every global batch of a run."""

    def __init__(
        self,
        groups: Sequence[Sequence[StreamOrder]],
        global_batch_size: int,
        num_canonical_nodes: int,
        block: int,
        seed: int,
        shuffle: bool,
    ):
        """
        Args:
            groups: streams grouped by latent shape.
            block: number of samples within a canonical node that are shuffled together.
        """
        self.groups = groups
        self.global_batch_size = global_batch_size
        self.num_nodes = num_canonical_nodes
        self.block = block
        self.seed = seed
        self.shuffle = shuffle
        self.num_batches = [sum(stream.chosen for stream in group) // global_batch_size for group in groups]
        self.steps_per_epoch = sum(self.num_batches)
        # two entries each, because a prefetching loader may already be in the next epoch or block
        self._batches = lru_cache(2)(self._plan_batches)
        self._layout = lru_cache(2 * len(self.groups))(self._make_layout)
        self._blocks: dict[tuple[int, int], dict[tuple[int, int], Block]] = {}

    def samples(self, step: int, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Look up the samples in some slots of the global batch for `step`.

        Args:
            slots: (n,) slots of the global batch.

        Returns:
            (n,) file numbers and (n,) rows within these files.
        """
        epoch, batch = divmod(step, self.steps_per_epoch)
        group, number = self._batch(epoch, batch)
        nodes = slots % self.num_nodes
        places = number * (self.global_batch_size // self.num_nodes) + slots // self.num_nodes
        blocks = (places + self._stagger(nodes)) // self.block if self.shuffle else places // self.block
        files, rows = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
        for node, block in sorted(set(zip(nodes.tolist(), blocks.tolist(), strict=True))):
            here = (nodes == node) & (blocks == block)
            start, block_files, block_rows = self._block(epoch, group, node, block)
            files[here] = block_files[places[here] - start]
            rows[here] = block_rows[places[here] - start]
        return files, rows

    def _words(self, count: int, *key: int) -> NDArray[np.uint64]:
        """Return (count,) random words, which depend only on the seed and `key`."""
        # raw words, because NumPy's distributions and shuffles may change between versions (NEP 19)
        return np.random.Philox(np.random.SeedSequence([self.seed, *key])).random_raw(count)

    def _shuffled(self, count: int, *key: int) -> NDArray[np.int64]:
        """Return a random permutation of the numbers below `count`."""
        return np.argsort(self._words(count, *key), kind="stable")

    def _stagger(self, nodes: Any) -> Any:
        """Return the number of samples by which each node's block boundaries are shifted."""
        # shifted so that the canonical nodes do not all reach new files at the same step
        return nodes * self.block // self.num_nodes if self.shuffle else 0 * nodes

    def _batch(self, epoch: int, batch: int) -> tuple[int, int]:
        """Return the group to which an epoch's global batch belongs, and the batch's number within that group."""
        if len(self.groups) == 1:
            return 0, batch
        origins, numbers = self._batches(epoch)
        return int(origins[batch]), int(numbers[batch])

    def _plan_batches(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the group of each global batch in an epoch and its number in that group, (steps_per_epoch,) each."""
        origins = np.repeat(np.arange(len(self.groups)), self.num_batches)
        if self.shuffle:
            origins = origins[self._shuffled(len(origins), epoch, BATCHES)]
        numbers = np.empty_like(origins)
        for group, count in enumerate(self.num_batches):
            numbers[origins == group] = np.arange(count)
        return origins, numbers

    def _make_layout(self, epoch: int, group: int) -> Layout:
        """Lay out an epoch's passes over a group's files, with complete passes of a stream before its partial pass."""
        passes = []
        for k, stream in enumerate(self.groups[group]):
            present = np.flatnonzero(stream.counts)
            num_whole, rest = divmod(stream.chosen, int(stream.counts.sum()))
            for number in range(num_whole):
                passes.append((number, k, present, stream.counts[present], False))
            if rest:
                if self.shuffle:
                    start = int(self._words(1, epoch, PASSES, group, k)[0]) % int(stream.counts.sum())
                    taken = quotas(stream.counts, rest, start)
                else:
                    before = stream.counts.cumsum() - stream.counts
                    taken = np.clip(rest - before, 0, stream.counts)
                present = np.flatnonzero(taken)
                passes.append((num_whole, k, present, taken[present], True))
        passes.sort(key=lambda item: item[0])
        files = np.concatenate([present for _, _, present, _, _ in passes])
        streams = np.concatenate([np.full(len(present), k) for _, k, present, _, _ in passes])
        counts = np.concatenate([taken for _, _, _, taken, _ in passes])
        partial = np.concatenate([np.full(len(present), part) for _, _, present, _, part in passes])
        if self.shuffle:
            # passes are shuffled separately, which keeps repetitions of a sample apart
            numbers = np.concatenate([np.full(len(present), number) for number, _, present, _, _ in passes])
            order = np.lexsort((self._words(len(files), epoch, PASSES, group), numbers))
            files, streams, counts, partial = files[order], streams[order], counts[order], partial[order]
        return Layout(files, streams, partial, counts.cumsum())

    def _block(self, epoch: int, group: int, node: int, block: int) -> Block:
        """Return a block. The last two blocks computed for each canonical node are cached."""
        kept = self._blocks.setdefault((group, node), {})
        if (epoch, block) not in kept:
            if len(kept) == 2:
                del kept[next(iter(kept))]
            kept[epoch, block] = self._make_block(epoch, group, node, block)
        return kept[epoch, block]

    def _make_block(self, epoch: int, group: int, node: int, block: int) -> Block:
        """Compute a shuffled block of a canonical node."""
        length = self.num_batches[group] * self.global_batch_size // self.num_nodes
        offset = int(self._stagger(node))
        start, stop = max(block * self.block - offset, 0), min((block + 1) * self.block - offset, length)
        layout = self._layout(epoch, group)
        begin, end = node * length + start, node * length + stop
        first, last = np.searchsorted(layout.ends, [begin, end - 1], side="right")
        files, rows = [], []
        for unit in range(first, last + 1):
            stream = self.groups[group][layout.streams[unit]]
            file, unit_end = int(layout.files[unit]), int(layout.ends[unit])
            unit_begin = int(layout.ends[unit - 1]) if unit else 0
            unit_rows = stream.rows(file)
            if layout.partial[unit]:
                count = unit_end - unit_begin
                if self.shuffle:
                    drawn = self._shuffled(len(unit_rows), epoch, ROWS, group, int(layout.streams[unit]), file)
                    unit_rows = unit_rows[np.sort(drawn[:count])]
                unit_rows = unit_rows[:count]
            unit_rows = unit_rows[max(begin - unit_begin, 0) : end - unit_begin]
            rows.append(unit_rows)
            files.append(np.full(len(unit_rows), stream.first_file + file, np.int32))
        block_files, block_rows = np.concatenate(files), np.concatenate(rows).astype(np.int32)
        if self.shuffle:
            order = self._shuffled(len(block_files), epoch, BLOCK, group, node, block)
            block_files, block_rows = block_files[order], block_rows[order]
        return start, block_files, block_rows
