"""Find and validate the metadata files, and read them in batches with canonical names for LAION's columns."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precompute.select.rules import Rule
from shards.base.errors import RequestError, WorkError
from shards.format.scores import SCORES

COLUMNS: dict[str, tuple[pa.DataType, tuple[str, ...]]] = {
    "URL": (pa.string(), ("URL", "url")),
    "TEXT": (pa.string(), ("TEXT", "text", "CAPTION", "caption")),
    "WIDTH": (pa.int32(), ("WIDTH", "width", "original_width")),
    "HEIGHT": (pa.int32(), ("HEIGHT", "height", "original_height")),
    **{
        score.column: (pa.float32(), tuple(dict.fromkeys((score.column, *score.fields, score.name.upper()))))
        for score in SCORES
    },
    "hash": (pa.int64(), ("hash",)),
    "LANGUAGE": (pa.string(), ("LANGUAGE", "language")),
    "source_key": (pa.string(), ("key", "source_key")),  # img2dataset reserves the name `key`
}
"""Canonical column name → (type in the selected files, names under which the LAION releases publish the column)."""
OUTPUT_SCHEMA = pa.schema([(name, kind) for name, (kind, _) in COLUMNS.items()])
DICTIONARY_COLUMNS = ["LANGUAGE"]  # URLs and captions rarely repeat, so dictionary encoding would only cost time
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
    """Canonical column name → name of the column in this file."""

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]


def find_files(metadata: str) -> list[str]:
    """Return the sorted addresses of the parquet files at `metadata`, which is a file, a folder or a glob. Raises
    RequestError if there are none, or they cannot be listed."""
    try:
        file_system, path = fsspec.core.url_to_fs(metadata)
        if file_system.isfile(path):
            found = [path]
        else:
            found = file_system.glob(f"{path.rstrip('/')}/**/*.parquet" if file_system.isdir(path) else path)
    except (OSError, ImportError, ValueError) as error:
        raise RequestError(f"The metadata {metadata} cannot be listed: {error}. Check --metadata.") from error
    if not found:
        raise RequestError(
            f"There is no parquet file at {metadata}. Pass a file, a folder or a glob with --metadata PATH."
        )
    return [file_system.unstrip_protocol(name) for name in sorted(found)]


def inspect(address: str, rules: list[Rule]) -> MetadataFile:
    """Validate a metadata file from its footer, and describe it. Raises RequestError if the file is not parquet, lacks
    a column that a rule needs, or has a column of an unsuitable type."""
    footer = read_footer(address)
    found = find_columns(footer.schema, address)
    for rule in rules:
        for column in rule.columns:
            if column not in found:
                off = f", or disable the filter with --{rule.option} null" if rule.option else ""
                raise RequestError(
                    f"{address} has no column for {column}, which the rule `{rule.name}` needs ({rule.condition}). "
                    f"Its columns are {', '.join(footer.schema.names)}. Use metadata with that column{off}."
                )
    check_types(footer.schema, found, address)
    return MetadataFile(address, footer.num_rows, footer.num_bytes, footer.sha256, found)


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
    """Read the footer of a parquet file. Raises RequestError if the file is empty or not parquet."""
    try:
        with fsspec.open(str(address), "rb") as file:
            if not (num_bytes := file.seek(0, 2)):
                raise RequestError(f"{address} is empty. Download it again, or remove it.")
            metadata = pq.read_metadata(file)
            # a parquet file ends with the footer, its 4-byte length, and PAR1
            file.seek(-8 - metadata.serialized_size, 2)
            sha256 = hashlib.sha256(file.read(metadata.serialized_size)).hexdigest()
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"{address} cannot be read as parquet: {error}. Replace or remove the file.") from None
    return Footer(metadata.schema.to_arrow_schema(), metadata.num_rows, num_bytes, sha256)


def find_columns(schema: pa.Schema, location: str) -> dict[str, str]:
    """Return a dict from the canonical name of each known column in `schema` to the column's name in the file. Raises
    RequestError if the file has the same column under two spellings."""
    found = {}
    for name, (_, spellings) in COLUMNS.items():
        present = [spelling for spelling in spellings if spelling in schema.names]
        if len(present) > 1:
            raise RequestError(
                f"{location} has the columns {' and '.join(f'`{spelling}`' for spelling in present)}, which are both "
                f"names for {name}, so the choice is ambiguous. Keep only one of them."
            )
        if present:
            found[name] = present[0]
    return found


def check_types(schema: pa.Schema, found: dict[str, str], location: str) -> None:
    """Raise RequestError unless the type of each known column can be converted to the type in OUTPUT_SCHEMA."""
    for name, spelling in found.items():
        wanted, actual = OUTPUT_SCHEMA.field(name).type, schema.field(spelling).type
        actual = actual.value_type if pa.types.is_dictionary(actual) else actual
        is_text = pa.types.is_string(actual) or pa.types.is_large_string(actual)
        is_integer = pa.types.is_integer(actual)
        fits = {"hash": is_integer, "source_key": is_text or is_integer}.get(
            name, is_text if pa.types.is_string(wanted) else is_integer or pa.types.is_floating(actual)
        )
        if not fits and not pa.types.is_null(actual):
            raise RequestError(
                f"{location}: the column `{spelling}` has type {actual}, but {name} must have type {wanted}. Fix or "
                f"remove the file."
            )


def read_batches(source: MetadataFile) -> Iterator[pa.RecordBatch]:
    """Yield the file's rows in order, with its known columns under their canonical names. Memory use does not depend on
    the size of the file or of its row groups.

    Raises WorkError if the file is damaged, or has changed since it was inspected.
    """
    num_rows = 0
    try:
        if source.address.startswith("file://"):
            handle = pa.OSFile(source.address.removeprefix("file://"))
        else:
            # each column is read sequentially in BUFFER_BYTES pieces; fsspec's read-ahead would refetch the same bytes
            handle = fsspec.open(source.address, "rb", cache_type="none").open()
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
        column, field = batch.column(spelling), OUTPUT_SCHEMA.field(name)
        if pa.types.is_string(field.type) or pa.types.is_null(column.type):
            column = column.cast(field.type)  # the column may have dictionary, large string, numeric or null type
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=list(wanted))


def unify(batch: pa.RecordBatch) -> pa.Table:
    """Convert a batch with canonical column names to a table of OUTPUT_SCHEMA, filling missing columns with nulls.
    Raises pa.ArrowInvalid if a number is out of range for its column, such as a width of 10¹²."""
    columns = []
    for field in OUTPUT_SCHEMA:
        if field.name not in batch.schema.names:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(field.name)
        if pa.types.is_integer(field.type) and pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), None, column)  # pandas writes missing integers as NaN
        # some releases store the 64-bit hash as unsigned, so let it wrap around
        columns.append(column.cast(field.type, safe=field.name != "hash"))
    return pa.table(columns, schema=OUTPUT_SCHEMA)
