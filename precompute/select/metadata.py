"""The metadata files: found, checked before any work, and read in batches, LAION's columns under one name each."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precompute.select.rules import Rule
from shards.base.errors import RequestError, WorkError

COLUMNS: dict[str, tuple[pa.DataType, tuple[str, ...]]] = {
    "URL": (pa.string(), ("URL", "url")),
    "TEXT": (pa.string(), ("TEXT", "text", "CAPTION", "caption")),
    "WIDTH": (pa.int32(), ("WIDTH", "width", "original_width")),
    "HEIGHT": (pa.int32(), ("HEIGHT", "height", "original_height")),
    "similarity": (pa.float32(), ("similarity", "SIMILARITY")),
    "hash": (pa.int64(), ("hash",)),
    "punsafe": (pa.float32(), ("punsafe", "PUNSAFE")),
    "pwatermark": (pa.float32(), ("pwatermark", "PWATERMARK")),
    "AESTHETIC_SCORE": (pa.float32(), ("AESTHETIC_SCORE", "aesthetic", "aesthetic_score", "AESTHETIC")),
    "LANGUAGE": (pa.string(), ("LANGUAGE", "language")),
    "source_key": (pa.string(), ("key", "source_key")),  # img2dataset keeps the name `key` for its own
}
"""Our name → the type that select writes, whatever the releases have, and the names that they publish it under."""
OUTPUT_SCHEMA = pa.schema([(name, kind) for name, (kind, _) in COLUMNS.items()])
DICTIONARY_COLUMNS = ["LANGUAGE"]  # URLs and captions hardly repeat, so parquet's dictionaries of them would only cost
BATCH_ROWS = 131_072
WORK_NAME = ".work"  # in the output folder, until the selection is finished
BUFFER_BYTES = 2**22  # read at once of each column: whole row groups may be gigabytes


@dataclass(frozen=True)
class MetadataFile:
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
        else:
            found = file_system.glob(f"{path.rstrip('/')}/**/*.parquet" if file_system.isdir(path) else path)
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
    footer = read_footer(address)
    found = find_columns(footer.schema, address)
    for rule in rules:
        for column in rule.columns:
            if column not in found:
                off = f", or switch the filter off: --{rule.option} null" if rule.option.startswith("filters") else ""
                raise RequestError(
                    f"{address} has no column for {column}, which the rule `{rule.name}` needs ({rule.condition}); "
                    f"it has {', '.join(footer.schema.names)}. Use metadata that has it{off}."
                )
    check_types(footer.schema, found, address)
    return MetadataFile(address, footer.num_rows, footer.num_bytes, footer.sha256, found)


@dataclass(frozen=True)
class Footer:
    """What the end of a parquet file says of it."""

    schema: pa.Schema
    num_rows: int
    num_bytes: int
    """Of the file."""
    sha256: str
    """Of the footer: it has each column chunk's size and extremes, so it changes with them."""


def read_footer(address: str | Path) -> Footer:
    """The footer of a parquet file.

    Raises:
        RequestError: it is empty, or cannot be read as parquet.
    """
    try:
        with fsspec.open(str(address), "rb") as file:
            if not (num_bytes := file.seek(0, 2)):
                raise RequestError(f"{address} is empty. Fetch it again, or remove it.")
            metadata = pq.read_metadata(file)
            file.seek(-8 - metadata.serialized_size, 2)  # the file ends: footer, its length in four bytes, PAR1
            sha256 = hashlib.sha256(file.read(metadata.serialized_size)).hexdigest()
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"{address} cannot be read as parquet: {error}. Mend or remove it.") from None
    return Footer(metadata.schema.to_arrow_schema(), metadata.num_rows, num_bytes, sha256)


def find_columns(schema: pa.Schema, place: str) -> dict[str, str]:
    """Our name → the file's name, for each known column that `schema` has.

    Raises:
        RequestError: one column is there under two spellings, so that we cannot know which is meant.
    """
    found = {}
    for name, (_, spellings) in COLUMNS.items():
        present = [spelling for spelling in spellings if spelling in schema.names]
        if len(present) > 1:
            raise RequestError(
                f"{place} has the columns {' and '.join(f'`{spelling}`' for spelling in present)}, which both mean "
                f"{name}. Keep one of them."
            )
        if present:
            found[name] = present[0]
    return found


def check_types(schema: pa.Schema, found: dict[str, str], place: str) -> None:
    """Refuse a known column whose type cannot be what it means.

    Raises:
        RequestError: such a column, with its type and the one wanted.
    """
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
                f"{place}: the column `{spelling}` is {actual}, and {name} is to be {wanted}. Mend or remove the file."
            )


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


def unify(batch: pa.RecordBatch) -> pa.Table:
    """Columns under our names → a table of OUTPUT_SCHEMA; columns that are not there are null.

    Raises:
        pa.ArrowInvalid: a number does not fit, such as a width of 10¹².
    """
    columns = []
    for field in OUTPUT_SCHEMA:
        if field.name not in batch.schema.names:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(field.name)
        if pa.types.is_integer(field.type) and pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), None, column)  # pandas writes missing integers so
        # hashes of 64 bits wrap around where the release has them unsigned
        columns.append(column.cast(field.type, safe=field.name != "hash"))
    return pa.table(columns, schema=OUTPUT_SCHEMA)
