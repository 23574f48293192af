"""Second pass, one partition at a time: which rows have a URL that came before, or that is on the opt-out list."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from precompute.select.passes.hashes import read_partition
from shards.base.durable import write_atomically

FILE_SHIFT = 40  # a row's place in the input order: file number × 2⁴⁰ + row in the filtered file
OPTED_OUT, DUPLICATE = 0, 1  # the last bit of a drop


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
    parts = [(read_partition(opt_out, partition), -1)] if opt_out else []
    parts += [(read_partition(folder, partition), number) for number, folder in enumerate(filtered)]
    entries = np.concatenate([entries for entries, _ in parts])
    places = np.concatenate([_places(entries, number) for entries, number in parts])
    write_atomically(target, _drops(entries, places, drop_duplicates).tobytes())
    return target


def _places(entries: np.ndarray, number: int) -> np.ndarray:
    """-1 for opted-out URLs, which so come before every row."""
    return np.full(len(entries), -1) if number < 0 else (number << FILE_SHIFT) + entries["row"]


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
