"""URLs as 128-bit hashes, on disk in partitions by their first bits, so that one partition fits in memory.

Two URLs of n share a hash by chance with probability n² / 2¹²⁹: 4 × 10⁻²⁰ for five billion.
"""

import math
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import xxhash

ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<i8")])
SEGMENT_ROWS = 2**20
ENTRIES_NAME, OFFSETS_NAME = "hashes.bin", "offsets.npy"


def hash_urls(urls: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """(n, 2) uint64: the XXH3-128 of each URL's bytes, high half first."""
    digests = b"".join(map(xxhash.xxh3_128_digest, urls.cast(pa.binary()).to_pylist()))
    return np.frombuffer(digests, ">u8").reshape(-1, 2).astype(np.uint64)


def count_partitions(num_rows: int, partition_rows: int) -> int:
    """The power of two, up to 4096, that makes partitions of `partition_rows` rows or fewer on average."""
    return min(2 ** math.ceil(math.log2(max(num_rows / partition_rows, 1))), 4096)


class HashWriter:
    """Appends hashes in segments, each sorted by partition; the rows are numbered from 0 as they come."""

    def __init__(self, folder: Path, partitions: int):
        self.folder, self.partitions = folder, partitions
        self.num_rows = 0
        self.waiting: list[np.ndarray] = []
        self.offsets: list[np.ndarray] = []

    def __enter__(self) -> "HashWriter":
        self.file = (self.folder / ENTRIES_NAME).open("wb")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._write_segment()
            offsets = np.array(self.offsets, np.int64).reshape(-1, self.partitions + 1)
            np.save(self.folder / OFFSETS_NAME, offsets)
        self.file.close()

    def write(self, hashes: np.ndarray) -> None:
        """Append (n, 2) hashes."""
        self.waiting.append(hashes)
        if sum(map(len, self.waiting)) >= SEGMENT_ROWS:
            self._write_segment()

    def _write_segment(self) -> None:
        hashes = np.concatenate([np.empty((0, 2), np.uint64), *self.waiting])
        self.waiting = []
        prefix = partition_of(hashes[:, 0], self.partitions)
        order = np.argsort(prefix, kind="stable")
        entries = np.empty(len(hashes), ENTRY)
        entries["high"], entries["low"] = hashes[order].T
        entries["row"] = self.num_rows + order
        self.file.write(entries.tobytes())
        ends = np.cumsum(np.bincount(prefix, minlength=self.partitions))
        self.offsets.append(self.num_rows + np.concatenate([[0], ends]))
        self.num_rows += len(hashes)


def partition_of(high: np.ndarray, partitions: int) -> np.ndarray:
    """The first log2(partitions) bits, as uint16: numpy sorts those by radix."""
    return (high >> np.uint64(48)).astype(np.uint16) >> (16 - (partitions.bit_length() - 1))


def read_partition(folder: Path, partition: int) -> np.ndarray:
    """ENTRY of one partition, in the order in which they were written."""
    offsets = np.load(folder / OFFSETS_NAME, mmap_mode="r")
    parts = [np.empty(0, ENTRY)]
    with (folder / ENTRIES_NAME).open("rb") as file:
        for start, end in offsets[:, partition : partition + 2]:
            file.seek(int(start) * ENTRY.itemsize)
            parts.append(np.fromfile(file, ENTRY, int(end - start)))
    return np.concatenate(parts)
