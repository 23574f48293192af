"""The first and third passes of the selection, which read all rows; the second pass is in `duplicates.py`.

The first pass works on one input file at a time. It writes the rows that pass the rules and the hashes of their URLs.
The third pass works on one output file at a time. It writes the remaining rows in input order, `rows_per_file` rows
per file.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.select.config import SelectConfig
from precompute.select.datasets import DatasetConfig
from precompute.select.duplicates import COMPARABLE_NAME, HashWriter, hash_urls, rows_to_drop
from precompute.select.metadata import DICTIONARY_COLUMNS, WORK_NAME, Layout, MetadataFile, read_batches, unify
from precompute.select.rules import Rule, apply, build_rules, tally
from shards.base.durable import (
    canonical_json,
    fsync_file,
    fsync_tree,
    read_sealed_json,
    write_atomically,
    write_sealed_json,
)
from shards.base.errors import WorkError
from shards.base.urls import comparable_urls

RECEIPT_NAME, ROWS_NAME = "receipt.json", "rows.parquet"
GROUP_ROWS = 65_536  # rows per row group
VERSION = 4  # format version of the work folders; raising it invalidates existing folders


@dataclass(frozen=True)
class FilteredFile:
    """Result of the first pass for one input file."""

    folder: Path
    source: str
    """Name of the input file."""
    rows_out: int
    counts: Counter[str]
    """Counts for all input rows: the counts of `tally`, and the rows that each rule dropped, under its `counters`."""


@dataclass(frozen=True)
class Plan:
    """Settings that the first and third passes share for all files."""

    dataset: DatasetConfig
    layout: Layout
    opt_out_hosts: list[str]
    partitions: int


def _folder_of(config: SelectConfig, source: MetadataFile, plan: Plan) -> Path:
    """Return the work folder of an input file. Its name contains a hash of everything that its content depends on."""
    identity = [
        VERSION,
        asdict(source),
        config.filters.model_dump(mode="json"),
        config.urls.allow_private_hosts,
        plan.partitions,
        plan.opt_out_hosts,
        config.urls.opt_out is not None,
        plan.dataset.model_dump(mode="json"),
        [[field.name, str(field.type)] for field in plan.layout.schema],
    ]
    digest = hashlib.sha256(canonical_json({"identity": identity})).hexdigest()[:16]
    return config.output / WORK_NAME / f"{source.name.removesuffix('.parquet')}-{digest}"


def filter_file(config: SelectConfig, source: MetadataFile, plan: Plan) -> FilteredFile:
    """Filter one input file into its work folder, or reuse the folder of an earlier run if it is complete. Raises
    WorkError if the input is damaged, or a value is out of range for its column."""
    folder = _folder_of(config, source, plan)
    if not (folder / RECEIPT_NAME).exists():
        attempt = folder.with_name(f"{folder.name}.attempt")
        shutil.rmtree(attempt, ignore_errors=True)
        attempt.mkdir(parents=True)
        _write_attempt(attempt, config, source, plan)
        fsync_tree(attempt)
        attempt.replace(folder)
    receipt = read_sealed_json(folder / RECEIPT_NAME)
    return FilteredFile(folder, source.name, receipt["rows_out"], Counter(receipt["counts"]))


def _write_attempt(attempt: Path, config: SelectConfig, source: MetadataFile, plan: Plan) -> None:
    counts: Counter[str] = Counter()
    rules = build_rules(config.filters, config.urls, plan.opt_out_hosts, plan.dataset)
    schema = plan.layout.schema
    groups = write_rows(attempt / ROWS_NAME, _filtered(source, rules, schema, counts), schema, schema.names, "lz4")
    with HashWriter(attempt, plan.partitions) as hashes, ExitStack() as stack:
        comparable = None
        if config.urls.opt_out is not None:
            comparable = stack.enter_context(HashWriter(attempt / COMPARABLE_NAME, plan.partitions))
        for group in groups:
            hashes.add(hash_urls(group["URL"]))
            if comparable is not None:
                comparable.add(hash_urls(comparable_urls(group["URL"].combine_chunks())))
    num_rows = pq.read_metadata(attempt / ROWS_NAME).num_rows
    write_sealed_json(attempt / RECEIPT_NAME, {"rows_out": num_rows, "counts": counts})


def _filtered(source: MetadataFile, rules: list[Rule], schema: pa.Schema, counts: Counter[str]) -> Iterator[pa.Table]:
    for batch in read_batches(source):
        counts += tally(batch, buckets=())
        kept = apply(rules, batch, counts)
        try:
            yield unify(kept, schema)
        except pa.ArrowInvalid as error:
            message = f"{source.address} has an out-of-range value: {error}. Fix or remove the file."
            raise WorkError(message) from error


def write_rows(
    path: Path, tables: Iterable[pa.Table], schema: pa.Schema, names: list[str], compression: str
) -> Iterator[pa.Table]:
    """Write `tables` to `path`, and yield each row group once it is written. The file is complete only when the
    iterator is exhausted.

    Args:
        names: names of the columns in the file.
    """
    renamed = pa.schema([field.with_name(name) for field, name in zip(schema, names, strict=True)])
    with pq.ParquetWriter(path, renamed, compression=compression, use_dictionary=DICTIONARY_COLUMNS) as writer:
        for group in regroup(tables, GROUP_ROWS):
            writer.write_table(group.rename_columns(names), row_group_size=GROUP_ROWS)
            yield group


def regroup(tables: Iterable[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """Yield the rows of `tables` in tables of exactly `num_rows` rows; the last table may be shorter."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(part.num_rows for part in waiting) >= num_rows:
            joined = pa.concat_tables(waiting)
            whole = joined.num_rows - joined.num_rows % num_rows
            for start in range(0, whole, num_rows):
                yield joined.slice(start, num_rows).combine_chunks()
            waiting = [joined.slice(whole)]
    rest = pa.concat_tables(waiting) if waiting else None
    if rest is not None and rest.num_rows:
        yield rest.combine_chunks()


@dataclass(frozen=True)
class OutputFile:
    """An output file, which holds the selected rows [first_row, first_row + num_rows)."""

    number: int
    first_row: int
    num_rows: int

    @property
    def name(self) -> str:
        return f"selected-{self.number:05d}.parquet"


def plan_outputs(num_rows: int, rows_per_file: int) -> list[OutputFile]:
    """Split `num_rows` selected rows into output files."""
    starts = range(0, num_rows, rows_per_file)
    return [OutputFile(i, start, min(rows_per_file, num_rows - start)) for i, start in enumerate(starts)]


def write_output(
    folder: Path,
    output: OutputFile,
    filtered: Sequence[FilteredFile],
    kept: Sequence[int],
    drops: Sequence[Path],
    layout: Layout,
    buckets: Sequence[str],
) -> Counter[str]:
    """Write one output file into `folder`, unless a complete one exists; return the `tally` of its rows.

    Args:
        filtered: all filtered files, in input order.
        kept: number of rows left in each filtered file after `drops` are removed.
        drops: files that `find_drops` wrote, one per partition.
    """
    path, counts_path = folder / output.name, folder / f"{output.name}.counts.json"
    if counts_path.exists():  # written last, so the parquet file is complete
        return Counter(json.loads(counts_path.read_text()))
    counts: Counter[str] = Counter()
    temporary = path.with_suffix(".tmp")
    rows = _rows(output, filtered, kept, drops)
    for group in write_rows(temporary, rows, layout.schema, layout.published, "zstd"):
        counts += tally(group, buckets)
    assert counts["rows"] == output.num_rows, f"{output} has {counts['rows']} rows"
    fsync_file(temporary)  # otherwise a power cut could leave the counts of a file that is not complete
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
    """Yield the rows [low, high) of `file`, counting only the rows that are not in `dropped`."""
    keep = np.ones(file.rows_out, bool)
    keep[dropped] = False
    position = np.cumsum(keep)  # counts kept rows from 1
    keep &= (position > low) & (position <= high)
    start = 0
    with pq.ParquetFile(file.folder / ROWS_NAME) as rows:
        for index in range(rows.num_row_groups):
            num_rows = rows.metadata.row_group(index).num_rows
            mask = keep[start : start + num_rows]
            if mask.any():
                yield rows.read_row_group(index).filter(pa.array(mask))
            start += num_rows
