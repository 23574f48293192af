"""First pass, one input file at a time: the rows that pass the rules, and the hashes of their URLs."""

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from precompute.select.config import SelectConfig
from precompute.select.filter.rules import Rule, apply, build_rules
from precompute.select.filter.tally import tally
from precompute.select.metadata.columns import DICTIONARY_COLUMNS, OUTPUT_SCHEMA, unify
from precompute.select.metadata.inputs import WORK_NAME, MetadataFile, read_batches
from precompute.select.passes.hashes import hash_urls, write_hashes
from shards.base.durable import canonical_json, fsync_tree, read_sealed_json, write_sealed_json
from shards.base.errors import WorkError

RECEIPT_NAME, ROWS_NAME = "receipt.json", "rows.parquet"
GROUP_ROWS = 65_536  # rows of a row group, here and in the output
VERSION = 2  # of what a work folder holds


@dataclass(frozen=True)
class FilteredFile:
    """What the first pass left of one input file."""

    folder: Path
    source: str
    """The input file's name."""
    rows_out: int
    counts: Counter[str]
    """Of all its rows: `filter.tally`'s, and of those dropped each rule's `counters`."""


def _folder_of(config: SelectConfig, source: MetadataFile, opt_out_hosts: list[str], partitions: int) -> Path:
    """The work folder of one input file: its name changes with everything that its content depends on."""
    identity = [
        VERSION,
        asdict(source),
        config.filters.model_dump(mode="json"),
        config.urls.allow_private_hosts,
        partitions,
        opt_out_hosts,
    ]
    digest = hashlib.sha256(canonical_json({"identity": identity})).hexdigest()[:16]
    return config.output / WORK_NAME / f"{source.name.removesuffix('.parquet')}-{digest}"


def filter_file(config: SelectConfig, source: MetadataFile, opt_out_hosts: list[str], partitions: int) -> FilteredFile:
    """Filter one input file into its work folder, unless that is there, whole, from an earlier run.

    Raises:
        WorkError: the input is damaged, or a value does not fit its column.
        OSError: no space.
    """
    folder = _folder_of(config, source, opt_out_hosts, partitions)
    if not (folder / RECEIPT_NAME).exists():
        attempt = folder.with_name(f"{folder.name}.attempt")
        shutil.rmtree(attempt, ignore_errors=True)
        attempt.mkdir(parents=True)
        rules = build_rules(config.filters, config.urls, opt_out_hosts)
        _write_attempt(attempt, source, rules, partitions)
        fsync_tree(attempt)
        attempt.replace(folder)
    receipt = read_sealed_json(folder / RECEIPT_NAME)
    return FilteredFile(folder, source.name, receipt["rows_out"], Counter(receipt["counts"]))


def _write_attempt(attempt: Path, source: MetadataFile, rules: list[Rule], partitions: int) -> None:
    counts: Counter[str] = Counter()
    with pq.ParquetWriter(
        attempt / ROWS_NAME, OUTPUT_SCHEMA, compression="lz4", use_dictionary=DICTIONARY_COLUMNS
    ) as rows:

        def written() -> Iterator[pa.ChunkedArray]:
            for group in regroup(_filtered(source, rules, counts), GROUP_ROWS):
                rows.write_table(group, row_group_size=GROUP_ROWS)
                yield group["URL"]

        write_hashes(attempt, map(hash_urls, written()), partitions)
    num_rows = pq.read_metadata(attempt / ROWS_NAME).num_rows
    write_sealed_json(attempt / RECEIPT_NAME, {"rows_out": num_rows, "counts": counts})


def _filtered(source: MetadataFile, rules: list[Rule], counts: Counter[str]) -> Iterator[pa.Table]:
    for batch in read_batches(source):
        counts += tally(batch, buckets=())
        kept = apply(rules, batch, counts)
        try:
            yield unify(kept)
        except pa.ArrowInvalid as error:
            message = f"{source.address} has a value that cannot be meant: {error}. Mend or remove the file."
            raise WorkError(message) from error


def regroup(tables: Iterable[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of exactly `num_rows`; the last has the rest."""
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
