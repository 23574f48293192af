"""Third pass, one output file at a time: the rows that are left, in input order, `rows_per_file` to a file."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.select.filter.tally import tally
from precompute.select.metadata.columns import DICTIONARY_COLUMNS, OUTPUT_SCHEMA
from precompute.select.passes.dedupe import rows_to_drop
from precompute.select.passes.filtering import GROUP_ROWS, ROWS_NAME, FilteredFile, regroup
from shards.base.durable import canonical_json, write_atomically


@dataclass(frozen=True)
class OutputFile:
    """One output file: the selected rows [first_row, first_row + num_rows)."""

    number: int
    first_row: int
    num_rows: int

    @property
    def name(self) -> str:
        return f"selected-{self.number:05d}.parquet"


def plan_outputs(num_rows: int, rows_per_file: int) -> list[OutputFile]:
    """The output files of `num_rows` selected rows."""
    starts = range(0, num_rows, rows_per_file)
    return [OutputFile(i, start, min(rows_per_file, num_rows - start)) for i, start in enumerate(starts)]


def write_output(
    folder: Path,
    output: OutputFile,
    filtered: Sequence[FilteredFile],
    kept: Sequence[int],
    drops: Sequence[Path],
    buckets: Sequence[str],
) -> Counter[str]:
    """Write one output file into `folder`, unless it is there whole; its rows' `tally`.

    Args:
        filtered: all filtered files, in input order.
        kept: how many rows of each are left after `drops`.
    """
    path, counts_path = folder / output.name, folder / f"{output.name}.counts.json"
    if counts_path.exists():  # it is written last
        return Counter(json.loads(counts_path.read_text()))
    counts: Counter[str] = Counter()
    temporary = path.with_suffix(".tmp")
    with pq.ParquetWriter(temporary, OUTPUT_SCHEMA, compression="zstd", use_dictionary=DICTIONARY_COLUMNS) as writer:
        for table in regroup(_rows(output, filtered, kept, drops), GROUP_ROWS):
            writer.write_table(table, row_group_size=GROUP_ROWS)
            counts += tally(table, buckets)
    assert counts["rows"] == output.num_rows, f"{output} got {counts['rows']} rows"
    temporary.replace(path)
    write_atomically(counts_path, canonical_json(counts))
    return counts


def _rows(
    output: OutputFile, filtered: Sequence[FilteredFile], kept: Sequence[int], drops: Sequence[Path]
) -> Iterator[pa.Table]:
    end = output.first_row + output.num_rows
    start_of_file = 0
    for number, (file, num_kept) in enumerate(zip(filtered, kept, strict=True)):
        low, high = max(output.first_row - start_of_file, 0), min(end - start_of_file, num_kept)
        if low < high:
            yield from _kept_rows(file, np.concatenate(rows_to_drop(drops, number)), low, high)
        start_of_file += num_kept


def _kept_rows(file: FilteredFile, dropped: np.ndarray, low: int, high: int) -> Iterator[pa.Table]:
    """Of the rows of `file` that are not dropped, those from `low` up to `high`."""
    keep = np.ones(file.rows_out, bool)
    keep[dropped] = False
    position = np.cumsum(keep)  # 1 for the first row kept
    keep &= (position > low) & (position <= high)
    start = 0
    with pq.ParquetFile(file.folder / ROWS_NAME) as rows:
        for index in range(rows.num_row_groups):
            num_rows = rows.metadata.row_group(index).num_rows
            mask = keep[start : start + num_rows]
            if mask.any():
                yield rows.read_row_group(index).filter(pa.array(mask))
            start += num_rows
