"""URLs as 128-bit hashes, on disk in partitions by their first bits, so that one partition fits in memory.

Two URLs of n share a hash by chance with probability n² / 2¹²⁹: 4 × 10⁻²⁰ for five billion.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

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


def write_hashes(folder: Path, hashes: Iterable[np.ndarray], partitions: int) -> None:
    """(n, 2) hashes into `folder`, in segments that are each sorted by partition; rows are numbered as they come."""
    num_rows, offsets = 0, []
    with (folder / ENTRIES_NAME).open("wb") as file:
        for segment in _segments(hashes):
            prefix = partition_of(segment[:, 0], partitions)
            order = np.argsort(prefix, kind="stable")
            entries = np.empty(len(segment), ENTRY)
            entries["high"], entries["low"] = segment[order].T
            entries["row"] = num_rows + order
            file.write(entries.tobytes())
            sizes = np.bincount(prefix, minlength=partitions)
            offsets.append(num_rows + np.concatenate([[0], np.cumsum(sizes)]))
            num_rows += len(segment)
    np.save(folder / OFFSETS_NAME, np.array(offsets, np.int64).reshape(-1, partitions + 1))


def _segments(hashes: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The same, in arrays of SEGMENT_ROWS or more."""
    waiting: list[np.ndarray] = []
    for some in hashes:
        waiting.append(some)
        if sum(map(len, waiting)) >= SEGMENT_ROWS:
            yield np.concatenate(waiting)
            waiting = []
    if waiting:
        yield np.concatenate(waiting)


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
