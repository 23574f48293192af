"""The rows of one shard, as img2dataset wants them: an Arrow file with `url`, `caption` and the columns to carry."""

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from precompute.download.plan import InputShard
from precompute.select.columns import find_columns
from shards.errors import RequestError

# img2dataset gives these names to what it finds out itself
RESERVED = frozenset(
    "key caption url width height original_width original_height status error_message exif md5 sha256 sha512 jpg txt json".split()
)


def name_columns(schema: pa.Schema, extra_columns: list[str] | None, place: str) -> dict[str, str]:
    """The file's name → the stored name, for the columns of `schema` that are carried.

    LAION's columns get one spelling, a name that img2dataset reserves gets `source_` before it, and url and caption,
    which img2dataset stores under these names, are last.

    Raises:
        RequestError: `extra_columns` names a column that is not there, or a column is of a type that JSON cannot hold.
    """
    known = {spelling: name for name, spelling in find_columns(schema, place).items()}
    url, caption = (next(spelling for spelling, name in known.items() if name == wanted) for wanted in ("URL", "TEXT"))
    carried = [name for name in schema.names if name not in (url, caption)] if extra_columns is None else extra_columns
    names = {}
    for column in carried:
        if column not in schema.names:
            raise RequestError(f"{place} has no column `{column}` to carry; it has {', '.join(schema.names)}.")
        _check_type(schema.field(column), place)
        name = known.get(column, column)
        names[column] = f"source_{name}" if name in RESERVED else name
    return names | {caption: "caption", url: "url"}


def _check_type(field: pa.Field, place: str) -> None:
    kinds = (
        pa.types.is_boolean,
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_string,
        pa.types.is_large_string,
    )
    if not any(is_kind(field.type) for is_kind in kinds):
        raise RequestError(
            f"{place}: the column `{field.name}` is {field.type}, which a sample's JSON cannot hold. "
            "Name the columns to carry without it: --extra_columns a,b."
        )


def read_shard(shard: InputShard, extra_columns: list[str] | None) -> pa.Table:
    """The shard's rows, under their stored names.

    Raises:
        RequestError: see `name_columns`.
    """
    with pq.ParquetFile(shard.file) as file:
        names = name_columns(file.schema_arrow, extra_columns, str(shard.file))
        groups, skipped = _row_groups(file.metadata, shard)
        table = file.read_row_groups(groups, columns=list(names))
    table = table.slice(shard.first_row - skipped, shard.num_rows).select(list(names))
    return table.rename_columns(list(names.values())).replace_schema_metadata(None)


def _row_groups(metadata: pq.FileMetaData, shard: InputShard) -> tuple[list[int], int]:
    """The row groups that hold the shard, and how many rows come before the first of them."""
    groups: list[int] = []
    skipped = start = 0
    for index, num_rows in enumerate(_sizes(metadata)):
        end = start + num_rows
        if end > shard.first_row and start < shard.first_row + shard.num_rows:
            groups.append(index)
        elif not groups:
            skipped = end
        start = end
    return groups, skipped


def _sizes(metadata: pq.FileMetaData) -> Iterable[int]:
    return (metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))


def write_arrow(table: pa.Table, path: Path) -> None:
    """Write the file that img2dataset's downloader reads."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
