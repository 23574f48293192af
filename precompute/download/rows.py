"""The rows of one shard, as img2dataset wants them: an Arrow file with `url`, `caption` and the columns to carry."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.select.metadata import find_columns
from shards.base.errors import RequestError, WorkError

# img2dataset gives these names to what it finds out itself
RESERVED = {
    *("key", "caption", "url", "width", "height", "original_width", "original_height", "status", "error_message"),
    *("exif", "md5", "sha256", "sha512"),
}


@dataclass(frozen=True)
class PlannedTar:
    """The rows [first_row, first_row + num_rows) of one input file, which become one tar."""

    shard_id: int
    file: Path
    first_row: int
    num_rows: int

    @property
    def name(self) -> str:
        return f"{self.shard_id:05d}"


def name_columns(schema: pa.Schema, extra_columns: list[str] | None, place: str) -> dict[str, str]:
    """The file's name → the stored name, for the columns of `schema` that are carried.

    LAION's columns get one spelling, a name that img2dataset reserves gets `source_` before it, and caption and url,
    as img2dataset calls them, are last.

    Raises:
        RequestError: no URL or no TEXT column; `extra_columns` names a column that is not there; a column's type is
            none that JSON holds; two columns would get one name.
    """
    found = find_columns(schema, place)
    missing = [name for name in ("URL", "TEXT") if name not in found]
    if missing:
        raise RequestError(f"{place} has no {' and no '.join(missing)} column; it has {', '.join(schema.names)}.")
    known = {spelling: name for name, spelling in found.items()}
    core = {found["TEXT"]: "caption", found["URL"]: "url"}
    names = {}
    for column in schema.names if extra_columns is None else extra_columns:
        if column not in schema.names:
            raise RequestError(f"{place} has no column `{column}` to carry; it has {', '.join(schema.names)}.")
        name = known.get(column, column)
        names[column] = f"source_{name}" if name in RESERVED else name
    names |= core
    _check_types(schema, names, place)
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise RequestError(
            f"{place}: two columns would be stored as `{twice[0]}`. Name those to carry: --extra_columns."
        )
    return {column: name for column, name in names.items() if column not in core} | core


def _check_types(schema: pa.Schema, names: dict[str, str], place: str) -> None:
    for column, name in names.items():
        kind = _plain_type(schema.field(column).type)
        is_text = pa.types.is_string(kind) or pa.types.is_null(kind)
        is_number = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if not is_text and (name in ("url", "caption") or not is_number):
            raise RequestError(
                f"{place}: the column `{column}` is {kind}, which cannot be stored as {name}: caption and url are "
                "strings, and a sample's JSON holds strings, numbers and booleans. Name the columns to carry: "
                "--extra_columns a,b."
            )


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Strings as `string`, dictionaries as what they encode."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.string() if pa.types.is_large_string(kind) else kind


def read_rows(shard: PlannedTar, extra_columns: list[str] | None) -> pa.Table:
    """The shard's rows, under their stored names.

    Raises:
        RequestError: see `name_columns`.
        WorkError: the file is damaged, or holds text that is not UTF-8.
    """
    try:
        with pq.ParquetFile(shard.file) as file:
            names = name_columns(file.schema_arrow, extra_columns, str(shard.file))
            groups, skipped = _row_groups(file.metadata, shard)
            table = file.read_row_groups(groups, columns=list(names))
        table = table.slice(shard.first_row - skipped, shard.num_rows).select(list(names))
        table = table.cast(pa.schema([(field.name, _plain_type(field.type)) for field in table.schema]))
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        rows = f"{shard.first_row} to {shard.first_row + shard.num_rows}"
        raise WorkError(f"{shard.file} cannot be read at rows {rows}: {error}. Mend the file") from error
    return table.rename_columns(list(names.values()))


def _row_groups(metadata: pq.FileMetaData, shard: PlannedTar) -> tuple[list[int], int]:
    """The row groups that hold the shard, and how many rows come before the first of them."""
    starts = np.cumsum([0, *(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))])
    first = np.searchsorted(starts[1:], shard.first_row, side="right")
    end = np.searchsorted(starts[:-1], shard.first_row + shard.num_rows)
    return list(range(first, end)), int(starts[first])


def write_arrow(table: pa.Table, path: Path) -> None:
    """Write the file that img2dataset's downloader reads."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
