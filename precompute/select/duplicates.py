"""Second pass, one partition at a time: which rows have a URL that came before, or that is on the opt-out list.

URLs are 128-bit hashes, on disk in partitions by their first bits, so that one partition fits in memory. Two URLs of n
share a hash by chance with probability n² / 2¹²⁹: 4 × 10⁻²⁰ for five billion.
"""

import math
from collections.abc import Iterable, Sequence
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
"""Subfolder with hashes of URLs as the opt-out list is compared with them; duplicates are compared byte for byte."""
FILE_SHIFT = 40  # a row's place in the input order: file number × 2⁴⁰ + row in the filtered file
OPTED_OUT, DUPLICATE = 0, 1  # the last bit of a drop


def hash_urls(urls: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """(n, 2) uint64: the XXH3-128 of each URL's bytes, high half first."""
    digests = b"".join(map(xxhash.xxh3_128_digest, urls.cast(pa.binary()).to_pylist()))
    return np.frombuffer(digests, ">u8").reshape(-1, 2).astype(np.uint64)


def count_partitions(num_rows: int, partition_rows: int) -> int:
    """The power of two, up to 4096, that makes partitions of `partition_rows` rows or fewer on average."""
    return min(2 ** math.ceil(math.log2(max(num_rows / partition_rows, 1))), 4096)


def write_hashes(folder: Path, hashes: Iterable[np.ndarray], partitions: int) -> None:
    """Write (n, 2) hashes into `folder`; see `HashWriter`."""
    with HashWriter(folder, partitions) as writer:
        for some in hashes:
            writer.add(some)


class HashWriter:
    """Writes hashes into `folder`, in segments that are each sorted by partition; rows are numbered as they come."""

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
        """Add (n, 2) hashes."""
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


def find_drops(
    target: Path, partition: int, filtered: Sequence[Path], opt_out: Path | None, drop_duplicates: bool
) -> Path:
    """Write the drops of one partition to `target`, unless it is there: sorted int64, place × 2 + reason.

    Args:
        filtered: the folders of the filtered files, in input order; their URLs' hashes, and with `opt_out` those of
            the comparable URLs in the folder `COMPARABLE_NAME` of each.
        opt_out: the folder with the hashes of opted-out URLs.
    """
    if target.exists():
        return target
    drops = [np.empty(0, np.int64)]
    if opt_out:
        listed = read_partition(opt_out, partition)
        entries, places = _read_partitions([folder / COMPARABLE_NAME for folder in filtered], partition)
        # before every row
        entries, places = np.concatenate([listed, entries]), np.concatenate([np.full(len(listed), -1), places])
        first_places = _first_places(entries, places)
        drops.append(places[(first_places < 0) & (places >= 0)] * 2 + OPTED_OUT)
    if drop_duplicates:
        entries, places = _read_partitions(filtered, partition)
        drops.append(places[_first_places(entries, places) < places] * 2 + DUPLICATE)
    write_atomically(target, np.sort(np.concatenate(drops)).tobytes())
    return target


def _read_partitions(folders: Sequence[Path], partition: int) -> tuple[np.ndarray, np.ndarray]:
    """ENTRY of one partition of all files, and their places."""
    parts = [read_partition(folder, partition) for folder in folders]
    places = [(number << FILE_SHIFT) + entries["row"] for number, entries in enumerate(parts)]
    return np.concatenate([np.empty(0, ENTRY), *parts]), np.concatenate([np.empty(0, np.int64), *places])


def _first_places(entries: np.ndarray, places: np.ndarray) -> np.ndarray:
    """For each entry the place of the first one with the same hash; `places` ascend, apart from equal ones."""
    # lexsort is stable: within one hash the first in input order is first
    order = np.lexsort((entries["low"], entries["high"]))
    ordered = entries[order]
    is_first = np.ones(len(entries), bool)
    is_first[1:] = (ordered["high"][1:] != ordered["high"][:-1]) | (ordered["low"][1:] != ordered["low"][:-1])
    first_places = np.empty(len(entries), np.int64)
    first_places[order] = places[order][is_first][np.cumsum(is_first) - 1]
    return first_places


def rows_to_drop(paths: Sequence[Path], number: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of filtered file `number` that are opted out, and those that are duplicates, from all partitions' files."""
    low, high = number << (FILE_SHIFT + 1), (number + 1) << (FILE_SHIFT + 1)
    parts = [np.empty(0, np.int64)]
    for path in paths:
        if path.stat().st_size:
            values = np.memmap(path, np.int64, "r")
            parts.append(np.array(values[np.searchsorted(values, low) : np.searchsorted(values, high)]))
    drops_of_file = np.concatenate(parts) - low
    rows, reasons = drops_of_file // 2, drops_of_file % 2
    opted_out = rows[reasons == OPTED_OUT]
    return opted_out, np.setdiff1d(rows[reasons == DUPLICATE], opted_out)  # a row counts once
