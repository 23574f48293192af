"""Second pass of the selection: find rows with duplicate or opted-out URLs, one hash partition at a time.

URLs are represented by 128-bit hashes, partitioned on disk by their leading bits so that one partition fits in memory.
The probability that any two of n distinct URLs have the same hash is about n² / 2¹²⁹: 4 × 10⁻²⁰ for five billion URLs.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import xxhash

from shards.base.durable import write_atomically

ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<i8")])
SEGMENT_ROWS = 2**20
ENTRIES_NAME, OFFSETS_NAME = "hashes.bin", "offsets.npy"
COMPARABLE_NAME = "comparable"
"""Subfolder with the hashes of canonical URLs, which are matched against the opt-out list. Duplicates are found with
the hashes of the URLs' exact bytes instead."""
FILE_SHIFT = 40  # a row's position in input order is file number × 2⁴⁰ + row number in the filtered file
OPTED_OUT, DUPLICATE = 0, 1  # drop reason, stored in the lowest bit of the integer for each row to drop


def hash_urls(urls: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """Return the XXH3-128 hash of each URL's bytes as (n, 2) uint64, high half first."""
    digests = b"".join(map(xxhash.xxh3_128_digest, urls.cast(pa.binary()).to_pylist()))
    return np.frombuffer(digests, ">u8").reshape(-1, 2).astype(np.uint64)


def count_partitions(num_rows: int, partition_rows: int) -> int:
    """Return the smallest power of two for which partitions have at most `partition_rows` rows on average, capped at
    4096."""
    return min(2 ** math.ceil(math.log2(max(num_rows / partition_rows, 1))), 4096)


class HashWriter:
    """Writer for hashes of URLs, in segments that are each sorted by partition. Rows are numbered in the order in which
    they are added."""

    def __init__(self, folder: Path, partitions: int):
        self.folder, self.partitions = folder, partitions
        self.waiting: list[np.ndarray] = []
        self.num_rows = 0
        self.offsets: list[np.ndarray] = []
        folder.mkdir(exist_ok=True)
        self.file = (folder / ENTRIES_NAME).open("wb")

    def __enter__(self) -> "HashWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self.file:
            if kind is None:
                self._write_segment()
                np.save(self.folder / OFFSETS_NAME, np.array(self.offsets, np.int64).reshape(-1, self.partitions + 1))

    def add(self, hashes: np.ndarray) -> None:
        """Add (n, 2) hashes, and write a segment once enough of them are buffered."""
        self.waiting.append(hashes)
        if sum(map(len, self.waiting)) >= SEGMENT_ROWS:
            self._write_segment()

    def _write_segment(self) -> None:
        if not self.waiting:
            return
        segment = np.concatenate(self.waiting)
        self.waiting = []
        prefix = partition_of(segment[:, 0], self.partitions)
        order = np.argsort(prefix, kind="stable")
        entries = np.empty(len(segment), ENTRY)
        entries["high"], entries["low"] = segment[order].T
        entries["row"] = self.num_rows + order
        self.file.write(entries.tobytes())
        sizes = np.bincount(prefix, minlength=self.partitions)
        self.offsets.append(self.num_rows + np.concatenate([[0], np.cumsum(sizes)]))
        self.num_rows += len(segment)


def partition_of(high: np.ndarray, partitions: int) -> np.ndarray:
    """Return the partition of each hash, given by its leading log2(partitions) bits. The type is uint16, for which
    NumPy has a radix sort."""
    return (high >> np.uint64(48)).astype(np.uint16) >> (16 - (partitions.bit_length() - 1))


def read_partition(folder: Path, partition: int) -> np.ndarray:
    """Return the ENTRY records of one partition, in the order in which they were written."""
    offsets = np.load(folder / OFFSETS_NAME, mmap_mode="r")
    parts = [np.empty(0, ENTRY)]
    with (folder / ENTRIES_NAME).open("rb") as file:
        for start, end in offsets[:, partition : partition + 2]:
            file.seek(int(start) * ENTRY.itemsize)
            parts.append(np.fromfile(file, ENTRY, int(end - start)))
    return np.concatenate(parts)


def find_drops(
    target: Path, partition: int, filtered: Sequence[Path], opt_out: Path | None, drop_duplicates: bool
) -> Path:
    """Find the opted-out and duplicate rows of one partition, write them to `target` as sorted int64 values
    (position × 2 + reason), and return `target`.

    If `target` already exists, it is returned unchanged.

    Args:
        filtered: folders of the filtered files, in input order. Each contains the hashes of the file's URLs and, if
            `opt_out` is given, a subfolder `COMPARABLE_NAME` with the hashes of its canonical URLs.
        opt_out: folder with the hashes of opted-out URLs.
    """
    if target.exists():
        return target
    drops = [np.empty(0, np.int64)]
    if opt_out:
        listed = read_partition(opt_out, partition)
        entries, positions = _read_partitions([folder / COMPARABLE_NAME for folder in filtered], partition)
        # opted-out URLs get position -1, so that they come before every row
        entries, positions = np.concatenate([listed, entries]), np.concatenate([np.full(len(listed), -1), positions])
        first_positions = _first_positions(entries, positions)
        drops.append(positions[(first_positions < 0) & (positions >= 0)] * 2 + OPTED_OUT)
    if drop_duplicates:
        entries, positions = _read_partitions(filtered, partition)
        drops.append(positions[_first_positions(entries, positions) < positions] * 2 + DUPLICATE)
    write_atomically(target, np.sort(np.concatenate(drops)).tobytes())
    return target


def _read_partitions(folders: Sequence[Path], partition: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ENTRY records of one partition across all files, and their positions in input order."""
    parts = [read_partition(folder, partition) for folder in folders]
    positions = [(number << FILE_SHIFT) + entries["row"] for number, entries in enumerate(parts)]
    return np.concatenate([np.empty(0, ENTRY), *parts]), np.concatenate([np.empty(0, np.int64), *positions])


def _first_positions(entries: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """For each entry, return the position of the first entry with the same hash; `positions` must not decrease."""
    # lexsort is stable, so equal hashes keep their input order
    order = np.lexsort((entries["low"], entries["high"]))
    ordered = entries[order]
    is_first = np.ones(len(entries), bool)
    is_first[1:] = (ordered["high"][1:] != ordered["high"][:-1]) | (ordered["low"][1:] != ordered["low"][:-1])
    first_positions = np.empty(len(entries), np.int64)
    first_positions[order] = positions[order][is_first][np.cumsum(is_first) - 1]
    return first_positions


def rows_to_drop(paths: Sequence[Path], number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the opted-out rows and of the duplicate rows to drop from filtered file `number`, merged
    from the `find_drops` outputs of all partitions."""
    low, high = number << (FILE_SHIFT + 1), (number + 1) << (FILE_SHIFT + 1)
    parts = [np.empty(0, np.int64)]
    for path in paths:
        if path.stat().st_size:
            values = np.memmap(path, np.int64, "r")
            parts.append(np.array(values[np.searchsorted(values, low) : np.searchsorted(values, high)]))
    drops_of_file = np.concatenate(parts) - low
    rows, reasons = drops_of_file // 2, drops_of_file % 2
    opted_out = rows[reasons == OPTED_OUT]
    return opted_out, np.setdiff1d(rows[reasons == DUPLICATE], opted_out)  # count each row under only one reason
