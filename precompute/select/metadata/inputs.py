"""The metadata files: found, checked before any work, and read in batches of a fixed size."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.select.filter.rules import Rule
from precompute.select.metadata.columns import OUTPUT_SCHEMA, check_types, find_columns
from shards.base.errors import RequestError, WorkError

BATCH_ROWS = 131_072
WORK_NAME = ".work"  # in the output folder, until the selection is finished
BUFFER_BYTES = 2**22  # read at once of each column: whole row groups may be gigabytes


@dataclass(frozen=True)
class MetadataFile:
    """A parquet file of metadata."""

    address: str
    num_rows: int
    num_bytes: int
    footer_sha256: str
    columns: dict[str, str]
    """Our name → the file's."""

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]


def find_files(metadata: str) -> list[str]:
    """The addresses of all parquet files of `metadata`: itself, those below it, or those that it matches; sorted.

    Raises:
        RequestError: there is no such place, or no parquet in it.
    """
    try:
        file_system, path = fsspec.core.url_to_fs(metadata)
        if file_system.isfile(path):
            found = [path]
        elif file_system.isdir(path):
            found = file_system.glob(f"{path.rstrip('/')}/**/*.parquet")
        else:
            found = file_system.glob(path)
    except (OSError, ImportError, ValueError) as error:
        raise RequestError(f"The metadata {metadata} cannot be listed: {error}.") from error
    if not found:
        raise RequestError(
            f"There is no parquet file at {metadata}. Give a file, a folder or a glob with --metadata PATH."
        )
    return [file_system.unstrip_protocol(name) for name in sorted(found)]


def inspect(address: str, rules: list[Rule]) -> MetadataFile:
    """Read a file's footer, and see that it has what the rules need.

    Raises:
        RequestError: not a parquet file, a column that a rule needs is missing, or one is of a wrong type.
    """
    try:
        with fsspec.open(address, "rb") as file:
            num_bytes = file.seek(0, 2)
            if num_bytes == 0:
                raise RequestError(f"{address} is empty. Fetch it again, or remove it.")
            metadata = pq.read_metadata(file)
            footer = footer_sha256(file)
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"{address} cannot be read as parquet: {error}. Fetch it again, or remove it.") from None
    schema = metadata.schema.to_arrow_schema()
    found = find_columns(schema, address)
    for rule in rules:
        for column in rule.columns:
            if column not in found:
                off = f", or switch the filter off: --{rule.option} null" if rule.option.startswith("filters") else ""
                raise RequestError(
                    f"{address} has no column for {column}, which the rule `{rule.name}` needs ({rule.condition}); "
                    f"it has {', '.join(schema.names)}. Use metadata that has it{off}."
                )
    check_types(schema, found, address)
    return MetadataFile(address, metadata.num_rows, num_bytes, footer, found)


def footer_sha256(file: BinaryIO) -> str:
    """SHA-256 of a parquet file's footer: it has each column chunk's size and extremes, so it changes with them."""
    # the file ends: footer, its length in four bytes, PAR1
    file.seek(-8, 2)
    length = int.from_bytes(file.read(4), "little")
    file.seek(-8 - length, 2)
    return hashlib.sha256(file.read(length)).hexdigest()


def read_batches(source: MetadataFile, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The file's rows in order, its known columns (or those of them in `columns`) under our names.

    Memory does not depend on the file's size, nor on that of its row groups.

    Raises:
        WorkError: the file is damaged, or changed since it was inspected.
    """
    wanted = {name: spelling for name, spelling in source.columns.items() if columns is None or name in columns}
    num_rows = 0
    try:
        with _open(source) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=list(wanted.values())):
                num_rows += batch.num_rows
                yield _rename(batch, wanted)
    except (pa.ArrowException, OSError) as error:
        raise WorkError(
            f"{source.address} cannot be read after row {num_rows} of {source.num_rows}: {error}. Fetch it again; "
            "the other files' work is kept, and the same command goes on from there."
        ) from error
    if num_rows != source.num_rows:
        raise WorkError(f"{source.address} gave {num_rows} rows of {source.num_rows}. It changed; start again.")


@contextmanager
def _open(source: MetadataFile) -> Iterator[pq.ParquetFile]:
    if source.address.startswith("file://"):
        handle = pa.OSFile(source.address.removeprefix("file://"))
    else:
        # each column is read in order, BUFFER_BYTES at a time: read-ahead of fsspec's own would fetch all many times
        handle = fsspec.open(source.address, "rb", cache_type="none").open()
    with handle, pq.ParquetFile(handle, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
        yield file


def _rename(batch: pa.RecordBatch, wanted: dict[str, str]) -> pa.RecordBatch:
    columns = []
    for name, spelling in wanted.items():
        column, field = batch.column(spelling), OUTPUT_SCHEMA.field(name)
        if pa.types.is_string(field.type) or pa.types.is_null(column.type):
            column = column.cast(field.type)  # dictionaries, large strings, numeric keys, columns of nothing
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=list(wanted))
