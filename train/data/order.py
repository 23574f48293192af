"""The order of samples over all epochs: a pure function of seed, data and batch size, evaluated where it is needed.

An epoch deals out `chosen` samples of every stream, a multiple of the global batch G. The MDS files of a group of
streams (all that share one latent shape) are shuffled and laid end to end; the sequence is cut into C equal spans, one
per **canonical node**; each span is cut into blocks, and each block is shuffled. Slot s of a global batch takes the
next sample of canonical node s mod C:

    files, shuffled      | 17 | 3 | 42 | 8 | 25 | 11 | 30 | 5 | …
    canonical nodes      |-------- 0 --------|-------- 1 --------| …
    blocks, shuffled     |--- 0 ---|--- 1 ---|- 0 -|--- 1 ---| 2 |      bounds staggered over the nodes

So a global batch mixes C blocks from all over the data; a machine that holds some of the canonical nodes reads a
bounded set of files at a time; and any sample's place follows from its file's place, with no more memory than the
files and the blocks at hand. Nothing depends on ranks, workers, or where a run was resumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 2
"""Of this file: one higher with each change that deals out samples otherwise. It is part of a run's fingerprint."""
Block = tuple[int, NDArray[np.int32], NDArray[np.int32]]
PASSES, ROWS, BLOCK, BATCHES = range(1, 5)
"""What a draw is for; each has a stream of its own."""


@dataclass(frozen=True, eq=False)
class StreamOrder:
    """What of a stream an epoch deals out."""

    first_file: int
    """Number of its first file among those of all streams."""
    counts: NDArray[np.int64]
    """(files,) samples of each that pass the stream's filter."""
    starts: NDArray[np.int64]
    """(files,) number of each file's first sample within the stream, passing or not."""
    mask: NDArray[np.uint8] | None
    """Bits, eight to a byte, of the samples that pass; None: all."""
    chosen: int
    """Samples per epoch."""

    def rows(self, file: int) -> NDArray[np.int64]:
        """(counts[file],) the samples of a file that pass, by their place in it."""
        if self.mask is None:
            return np.arange(self.counts[file])
        start = int(self.starts[file])
        stop = int(self.starts[file + 1]) if file + 1 < len(self.starts) else 8 * len(self.mask)
        bits = np.unpackbits(self.mask[start // 8 : -(-stop // 8)])
        return np.flatnonzero(bits[start % 8 : start % 8 + stop - start])


def choose_per_epoch(weight: float, num_samples: int, global_batch_size: int) -> int:
    """Samples of a stream in one epoch: weight × n, rounded down to whole global batches."""
    # of the weight as it was written: 0.29 × 100 is 29, and in floats 28.999…
    return int(Fraction(str(weight)) * num_samples) // global_batch_size * global_batch_size


def quotas(counts: NDArray[np.int64], wanted: int, start: int) -> NDArray[np.int64]:
    """How many samples of each file make up `wanted` of all: proportional to `counts`, and exact in sum.

    Systematic sampling: with `start` uniform in [0, sum), each sample is as likely as any other.
    """
    # as Python's integers: the products of billions of samples overflow 64 bits
    ends = np.concatenate([[0], counts.cumsum()]).astype(object)
    return np.diff((wanted * ends + start) // int(counts.sum())).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Layout:
    """The files of one group, laid end to end for one epoch."""

    files: NDArray[np.int64]
    """(units,) file numbers; a file stands once per pass."""
    streams: NDArray[np.int64]
    """(units,) which stream of the group each is of."""
    partial: NDArray[np.bool_]
    """(units,) whether only some of its passing samples are taken."""
    ends: NDArray[np.int64]
    """(units,) places in the sequence."""


class Order:
    """Global batches of all steps."""

    def __init__(
        self,
        groups: Sequence[Sequence[StreamOrder]],
        global_batch_size: int,
        num_canonical_nodes: int,
        block: int,
        seed: int,
        shuffle: bool = True,
    ):
        """`groups`: streams by latent shape; `block`: samples of a canonical node that are shuffled together."""
        self.groups = groups
        self.global_batch_size = global_batch_size
        self.num_nodes = num_canonical_nodes
        self.block = block
        self.seed = seed
        self.shuffle = shuffle
        self.num_batches = [sum(stream.chosen for stream in group) // global_batch_size for group in groups]
        self.steps_per_epoch = sum(self.num_batches)
        self._remember()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._remember()

    def samples(self, step: int, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(n,) file numbers and (n,) rows of the samples in `slots` of the global batch of `step`."""
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

    def _remember(self) -> None:
        # an epoch and the next, and of each canonical node the block at hand and the next, where a loader looks ahead
        self._batches = lru_cache(2)(self._plan_batches)
        self._layout = lru_cache(2 * len(self.groups))(self._lay_out)
        self._blocks: dict[tuple[int, int], dict[tuple[int, int], Block]] = {}

    def _words(self, count: int, *key: int) -> NDArray[np.uint64]:
        # a bit generator's own words: NumPy's distributions and shuffles may change with its version (NEP 19)
        return np.random.Philox(np.random.SeedSequence([self.seed, *key])).random_raw(count)

    def _shuffled(self, count: int, *key: int) -> NDArray[np.int64]:
        """(count,) the numbers below `count` in a drawn order."""
        return np.argsort(self._words(count, *key), kind="stable")

    def _stagger(self, nodes: Any) -> Any:
        # so that canonical nodes do not all come to new files at one step
        return nodes * self.block // self.num_nodes if self.shuffle else 0 * nodes

    def _batch(self, epoch: int, batch: int) -> tuple[int, int]:
        """The group of an epoch's global batch, and its number within that group."""
        if len(self.groups) == 1:
            return 0, batch
        origins, numbers = self._batches(epoch)
        return int(origins[batch]), int(numbers[batch])

    def _plan_batches(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        origins = np.repeat(np.arange(len(self.groups)), self.num_batches)
        if self.shuffle:
            origins = origins[self._shuffled(len(origins), epoch, BATCHES)]
        numbers = np.empty_like(origins)
        for group, count in enumerate(self.num_batches):
            numbers[origins == group] = np.arange(count)
        return origins, numbers

    def _lay_out(self, epoch: int, group: int) -> Layout:
        """All passes over a group's files: whole ones first, then what is left of each stream's share."""
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
            # each pass in an order of its own, so that repeats are apart
            numbers = np.concatenate([np.full(len(present), number) for number, _, present, _, _ in passes])
            order = np.lexsort((self._words(len(files), epoch, PASSES, group), numbers))
            files, streams, counts, partial = files[order], streams[order], counts[order], partial[order]
        return Layout(files, streams, partial, counts.cumsum())

    def _block(self, epoch: int, group: int, node: int, block: int) -> Block:
        """`_deal`'s, of which the last two of each canonical node that is asked for are kept."""
        kept = self._blocks.setdefault((group, node), {})
        if (epoch, block) not in kept:
            if len(kept) == 2:
                del kept[next(iter(kept))]
            kept[epoch, block] = self._deal(epoch, group, node, block)
        return kept[epoch, block]

    def _deal(self, epoch: int, group: int, node: int, block: int) -> Block:
        """A block of a canonical node: where it begins in the node's span, and its files and rows, shuffled."""
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
