"""Second pass, one partition at a time: which rows have a URL that came before, or that is on the opt-out list.

URLs are 128-bit hashes, on disk in partitions by their first bits, so that one partition fits in memory. Two URLs of n
share a hash by chance with probability n² / 2¹²⁹: 4 × 10⁻²⁰ for five billion.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from precompute.select.metadata import BATCH_ROWS, find_columns
from shards.base.durable import write_atomically
from shards.base.errors import RequestError

ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<i8")])
SEGMENT_ROWS = 2**20
ENTRIES_NAME, OFFSETS_NAME = "hashes.bin", "offsets.npy"
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


def find_drops(
    target: Path, partition: int, filtered: Sequence[Path], opt_out: Path | None, drop_duplicates: bool
) -> Path:
    """Write the drops of one partition to `target`, unless it is there: sorted int64, place × 2 + reason.

    Args:
        filtered: the folders of the filtered files, in input order.
        opt_out: the folder with the hashes of opted-out URLs.
    """
    if target.exists():
        return target
    parts = [read_partition(folder, partition) for folder in filtered]
    places = [(number << FILE_SHIFT) + entries["row"] for number, entries in enumerate(parts)]
    if opt_out:  # before every row
        parts = [read_partition(opt_out, partition), *parts]
        places = [np.full(len(parts[0]), -1), *places]
    write_atomically(target, _drops(np.concatenate(parts), np.concatenate(places), drop_duplicates).tobytes())
    return target


def _drops(entries: np.ndarray, places: np.ndarray, drop_duplicates: bool) -> np.ndarray:
    # lexsort is stable, and places ascend: within one hash the first in input order is first
    order = np.lexsort((entries["low"], entries["high"]))
    entries, places = entries[order], places[order]
    is_first = np.ones(len(entries), bool)
    is_first[1:] = (entries["high"][1:] != entries["high"][:-1]) | (entries["low"][1:] != entries["low"][:-1])
    first_places = places[is_first][np.cumsum(is_first) - 1]
    opted_out = (first_places < 0) & (places >= 0)
    duplicate = ~is_first & (first_places >= 0) & drop_duplicates
    return np.sort(np.concatenate([places[opted_out] * 2 + OPTED_OUT, places[duplicate] * 2 + DUPLICATE]))


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
    return rows[reasons == OPTED_OUT], rows[reasons == DUPLICATE]


def read_hosts(path: Path) -> list[str]:
    """The hosts that a text file lists, lower case, sorted: its lines without a `://`. Parquet lists URLs alone.

    Raises:
        RequestError: no such file, or not UTF-8.
    """
    if path.suffix == ".parquet":
        return []
    return sorted({line.lower().strip(".") for line in _lines(path) if "://" not in line})


def hash_listed_urls(path: Path, target: Path, partitions: int) -> None:
    """Hash every URL of the file into the folder `target`, in partitions.

    Raises:
        RequestError: no such file, not UTF-8, not parquet, or no URL column.
    """
    urls = _parquet_urls(path) if path.suffix == ".parquet" else _text_urls(path)
    write_hashes(target, map(hash_urls, urls), partitions)


def _text_urls(path: Path) -> Iterator[pa.Array]:
    urls = (line for line in _lines(path) if "://" in line)
    while batch := list(islice(urls, BATCH_ROWS)):
        yield pa.array(batch, pa.string())


def _parquet_urls(path: Path) -> Iterator[pa.Array]:
    try:
        with pq.ParquetFile(path) as file:
            column = find_columns(file.schema_arrow, str(path)).get("URL")
            if column is None:
                names = ", ".join(file.schema_arrow.names)
                raise RequestError(f"The opt-out file {path} has no URL column; it has {names}.")
            for batch in file.iter_batches(BATCH_ROWS, columns=[column]):
                yield batch.column(0).drop_null()
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"The opt-out file {path} cannot be read as parquet: {error}. Mend it.") from None


def _lines(path: Path) -> Iterator[str]:
    """The entries of a text file; blank lines and those that begin with # are none."""
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if (entry := line.strip()) and not entry.startswith("#"):
                    yield entry
    except FileNotFoundError:
        raise RequestError(f"There is no opt-out file {path}.") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"The opt-out file {path} is not UTF-8 text: {error}. Mend it, or give parquet.") from None
