"""Find and validate the metadata files, and read them in batches with canonical names for their columns."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precompute.input.parquet import is_number, plain_type
from precompute.select.datasets import COLUMNS, LAION, SCORE_COLUMNS, SPELLINGS, DatasetConfig
from precompute.select.rules import Rule, is_unreadable
from shards.base.errors import Outage, RequestError, WorkError
from shards.base.remote import outage, store_errors

CANONICAL = pa.schema([(name, kind) for name, (kind, _) in COLUMNS.items()])
IF_PRESENT = {"license", "md5", "sha256"}
"""Columns that the selected files have only if the metadata has them."""
DICTIONARY_COLUMNS = ["LANGUAGE", "license"]  # other texts rarely repeat, so dictionaries would only cost time
BATCH_ROWS = 131_072
WORK_NAME = ".work"  # subfolder of the output folder, removed when the selection is finished
BUFFER_BYTES = 2**22  # bytes read at a time from each column, because a whole row group may take gigabytes


@dataclass(frozen=True)
class MetadataFile:
    """A validated metadata file."""

    address: str
    num_rows: int
    num_bytes: int
    footer_sha256: str
    columns: dict[str, str]
    """Canonical name, or a kept column's own name → name of the column in this file."""

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]


def find_files(metadata: str, output: Path) -> list[str]:
    """Return the sorted addresses of the parquet files at `metadata`, which is a file, a folder or a glob, except those
    in the folder `output`. Raises RequestError if there are none, or they cannot be listed, and Outage if a remote
    store cannot be reached."""
    try:
        with _network_errors(metadata, ImportError, ValueError):
            file_system, path = fsspec.core.url_to_fs(metadata)
            if file_system.isfile(path):
                found = [path]
            else:
                is_folder = file_system.isdir(path)
                listed = file_system.find(path) if is_folder else file_system.glob(path)
                own = f"{os.path.abspath(output)}/" if "file" in file_system.protocol else None
                found = [name for name in listed if own is None or not os.path.abspath(name).startswith(own)]
                if is_folder:
                    found = [name for name in found if name.endswith(".parquet")]
    except (OSError, ImportError, ValueError) as error:
        raise RequestError(f"The metadata {metadata} cannot be listed: {error}. Check --metadata.") from error
    if not found:
        raise RequestError(
            f"There is no parquet file at {metadata}. Pass a file, a folder or a glob with --metadata PATH."
        )
    return [file_system.unstrip_protocol(name) for name in sorted(found)]


@contextmanager
def _network_errors(address: str, *expected: type[Exception]) -> Iterator[None]:
    """Convert exceptions as `store_errors` does, except OSErrors that do not come from the network: those of local
    files, those about damaged parquet files, and those about missing or unreadable ones."""
    is_remote = "://" in address and not address.startswith("file://")
    with store_errors(address, Outage, OSError, *expected):
        try:
            yield
        except OSError as error:
            if is_remote and (cause := _network_error(error)):
                raise outage(address, cause) from error
            raise


def _network_error(error: OSError) -> OSError | None:
    """Return the network error behind an OSError that was raised while reading a remote file, or None."""
    if isinstance(error, FileNotFoundError | PermissionError):
        return None
    is_from_pyarrow = type(error) is OSError and error.errno is None  # the file is damaged
    return None if is_from_pyarrow else error


def inspect(address: str, footer: "Footer", rules: list[Rule], dataset: DatasetConfig) -> MetadataFile:
    """Validate a metadata file from its footer, and describe it. Raises RequestError if the file lacks a column that a
    rule needs, or has a column of an unsuitable type."""
    found = find_columns(footer.schema, address, dataset)
    needed = [(rule, column) for rule in rules for column in dict.fromkeys(rule.columns) if column not in found]
    if needed:
        named = "; no column for ".join(
            f"{column}, which the rule `{rule.name}` needs ({rule.condition})" for rule, column in needed
        )
        options = dict.fromkeys(rule.option for rule, _ in needed if rule.option)
        filters = "the filters" if len(options) > 1 else "the filter"
        off = f", or disable {filters} with {' '.join(f'--{name} null' for name in options)}" if options else ""
        raise RequestError(
            f"{address} has no column for {named}. Its columns are {', '.join(footer.schema.names)}. Use metadata with "
            f"that column{off}."
        )
    check_types(footer.schema, found, address)
    for rule in rules:
        if rule.option.startswith("filters.scores."):
            spelling = found[rule.columns[0]]
            kind = plain_type(footer.schema.field(spelling).type)
            if not (is_number(kind) or pa.types.is_null(kind)):
                raise RequestError(
                    f"{address}: the column `{spelling}` has type {kind}, so {rule.option} cannot bound it."
                )
    return MetadataFile(address, footer.num_rows, footer.num_bytes, footer.sha256, found)


@dataclass(frozen=True)
class Layout:
    """The columns of the selected rows."""

    schema: pa.Schema
    """Canonical columns, then the kept ones under their own names."""
    published: list[str]
    """Name of each column in the selected files."""


def make_layout(files: Sequence[MetadataFile], schemas: Sequence[pa.Schema], dataset: DatasetConfig) -> Layout:
    """Return the columns of the rows selected from `files`, whose schemas are `schemas`. A file may lack some of them.

    Raises RequestError if a kept column has different types in two files.
    """
    present = {name for file in files for name in file.columns} | (COLUMNS.keys() - IF_PRESENT)
    kept = pa.schema([])
    for file, schema in zip(files, schemas, strict=True):
        own_fields = [
            pa.field(name, plain_type(schema.field(name).type)) for name in file.columns if name not in COLUMNS
        ]
        try:
            kept = pa.unify_schemas([kept, pa.schema(own_fields)], promote_options="permissive")
        except pa.ArrowException as error:
            raise RequestError(
                f"{file.address} has a column whose type differs from that in other files: {error}. Fix or remove the "
                f"file."
            ) from None
    ordered = [field for field in CANONICAL if field.name in present] + list(kept)
    own = {name: dataset.columns[name] for name in SCORE_COLUMNS if name in dataset.columns}
    return Layout(pa.schema(ordered), [own.get(field.name, field.name) for field in ordered])


@dataclass(frozen=True)
class Footer:
    """Schema and size of a parquet file, from its footer."""

    schema: pa.Schema
    num_rows: int
    num_bytes: int
    """Size of the file."""
    sha256: str
    """Hash of the footer. The footer contains the sizes and min/max statistics of all column chunks, so it changes with
    the data."""


def read_footer(address: str | Path) -> Footer:
    """Read the footer of a parquet file. Raises RequestError if the file is empty or not parquet, and Outage if a
    remote store cannot be reached."""
    try:
        with _network_errors(str(address), pa.ArrowException, RequestError), fsspec.open(str(address), "rb") as file:
            if not (num_bytes := file.seek(0, 2)):
                raise RequestError(f"{address} is empty. Download it again, or remove it.")
            metadata = pq.read_metadata(file)
            # a parquet file ends with the footer, its 4-byte length, and PAR1
            file.seek(-8 - metadata.serialized_size, 2)
            sha256 = hashlib.sha256(file.read(metadata.serialized_size)).hexdigest()
    except (pa.ArrowException, OSError) as error:
        reason = str(error).rstrip(".")
        raise RequestError(f"{address} cannot be read as parquet: {reason}. Replace or remove the file.") from None
    return Footer(metadata.schema.to_arrow_schema(), metadata.num_rows, num_bytes, sha256)


def find_columns(schema: pa.Schema, location: str, dataset: DatasetConfig = LAION) -> dict[str, str]:
    """Return a dict from the canonical name of each known column in `schema`, and the own name of each column to keep,
    to the column's name in the file.

    Raises:
        RequestError: the file has the same column under two of LAION's spellings, or the dataset gives a name that is
            unknown or taken.
    """
    if unknown := sorted(dataset.columns.keys() - COLUMNS.keys()):
        raise RequestError(f"dataset.columns has the unknown name {unknown[0]}. Choose from {', '.join(COLUMNS)}.")
    found = {}
    for name, (_, spellings) in COLUMNS.items():
        if name in dataset.columns:
            if dataset.columns[name] in schema.names:
                found[name] = dataset.columns[name]
            continue
        present = [each for each in spellings if each in schema.names and each not in dataset.columns.values()]
        if len(present) > 1:
            # only the selection has the setting `dataset`
            choose = "" if dataset is LAION else f", or choose one with dataset.columns, as in {{{name}: {present[0]}}}"
            raise RequestError(
                f"{location} has the columns {' and '.join(f'`{spelling}`' for spelling in present)}, which are both "
                f"names for {name}, so the choice is ambiguous. Keep only one of them{choose}."
            )
        if present:
            found[name] = present[0]
    for name in dataset.keep:
        if name in schema.names and name not in found.values():
            if name in SPELLINGS:
                raise RequestError(
                    f"dataset.keep has the column {name}, but selected files have another column for this name. "
                    f"Leave it out, or name it in dataset.columns."
                )
            found[name] = name
    return found


def check_types(schema: pa.Schema, found: dict[str, str], location: str) -> None:
    """Raise RequestError unless the type of each known column can be converted to the type in CANONICAL."""
    for name, spelling in found.items():
        if name not in COLUMNS:
            continue
        wanted, actual = CANONICAL.field(name).type, plain_type(schema.field(spelling).type)
        is_text, is_integer = pa.types.is_string(actual), pa.types.is_integer(actual)
        fits = {"hash": is_integer, "source_key": is_text or is_integer}.get(
            name, is_text if pa.types.is_string(wanted) else is_number(actual)
        )
        if not fits and not pa.types.is_null(actual):
            raise RequestError(
                f"{location}: the column `{spelling}` has type {actual}, but {name} must have type {wanted}. Fix or "
                f"remove the file."
            )


def read_batches(source: MetadataFile) -> Iterator[pa.RecordBatch]:
    """Yield the file's rows in order, with its known columns under their canonical names. Memory use does not depend on
    the size of the file or of its row groups.

    Raises WorkError if the file is damaged, or has changed since it was inspected, and Outage if a remote store cannot
    be reached.
    """
    num_rows = 0
    try:
        with _network_errors(source.address, pa.ArrowException):
            if source.address.startswith("file://"):
                handle = pa.OSFile(source.address.removeprefix("file://"))
            else:
                # each column is read sequentially in BUFFER_BYTES pieces, because fsspec's read-ahead would refetch the
                # same bytes
                file_system, path = fsspec.core.url_to_fs(source.address)
                handle = file_system.open(path, "rb", cache_type="none")
            with handle, pq.ParquetFile(handle, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
                for batch in file.iter_batches(BATCH_ROWS, columns=list(source.columns.values())):
                    num_rows += batch.num_rows
                    yield _rename(batch, source.columns)
    except (pa.ArrowException, OSError) as error:
        raise WorkError(
            f"{source.address} cannot be read after row {num_rows} of {source.num_rows}: {error}. Download it again, "
            "then run the same command, which reuses the work on the other files."
        ) from error
    if num_rows != source.num_rows:
        raise WorkError(
            f"{source.address} changed during the run: it now has {num_rows} rows instead of {source.num_rows}. Run "
            "the same command again."
        )


def _rename(batch: pa.RecordBatch, wanted: dict[str, str]) -> pa.RecordBatch:
    columns = []
    for name, spelling in wanted.items():
        column = batch.column(spelling)
        if pa.types.is_string_view(column.type):
            column = column.cast(pa.string())  # pyarrow cannot take rows of string views
        if name in COLUMNS:
            kind = CANONICAL.field(name).type
            if name in ("WIDTH", "HEIGHT"):
                column = _whole(column, kind)
            elif pa.types.is_string(kind) or pa.types.is_null(column.type):
                column = column.cast(kind)  # the column may have dictionary, large string, numeric or null type
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=list(wanted))


def _whole(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert numbers to the integer type `kind`. Numbers such as 512.5 and 10¹² become null."""
    if column.type == kind:
        return column
    values = np.asarray(column.cast(pa.float64(), safe=False))  # nulls become NaN
    limits = np.iinfo(kind.to_pandas_dtype())
    fits = (values >= limits.min) & (values <= limits.max) & (values == np.floor(values))
    return pa.array(np.where(fits, values, 0), kind, mask=~fits)


def unify(batch: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    """Convert a batch with canonical column names to a table with the schema of a `Layout`, filling missing columns
    with nulls, and replacing text that is invalid UTF-8 by null. Raises pa.ArrowInvalid if a number is out of range for
    its column, such as 2²⁴ + 1 as a float32 score."""
    columns = []
    for field in schema:
        if field.name not in batch.schema.names:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(field.name)
        # some releases store the 64-bit hash as unsigned, so let it wrap around
        column = column.cast(field.type, safe=field.name != "hash")
        if pa.types.is_string(field.type):
            absent = is_unreadable(column)
            if absent.sum() > column.null_count:
                column = pc.if_else(pa.array(absent), None, column)
        columns.append(column)
    return pa.table(columns, schema=schema)
