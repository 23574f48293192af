"""Which rows go into which tar, decided once per output folder, so that a row keeps its key for good; and the rows of
one, as img2dataset wants them: an Arrow file with `url`, `caption` and the columns to carry."""

from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.download.config import DownloadConfig
from precompute.select.metadata import WORK_NAME, find_columns, read_footer
from shards.base.durable import DamagedFile, read_sealed_json, write_sealed_json
from shards.base.errors import RequestError, WorkError

PLAN_NAME = "download_plan.json"
MAX_SHARDS = 100_000  # five digits name a shard, and begin each key
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


def plan_download(config: DownloadConfig) -> list[PlannedTar]:
    """The shards of `config.input`, in order; what `config.output` was begun with is kept to.

    A shard never spans two files, so files may be added at the end between two runs.

    Raises:
        RequestError: no parquet there, one that cannot be read or whose columns do not fit (see `name_columns`), no
            rows, too many shards, or the output was begun with other rows or settings.
    """
    inputs: list[dict[str, Any]] = []
    tars: list[PlannedTar] = []
    for path in find_parquet(config.input):
        footer = read_footer(path)
        name_columns(footer.schema, config.extra_columns, str(path))
        inputs.append({"name": path.name, "num_rows": footer.num_rows, "footer_sha256": footer.sha256})
        for first in range(0, footer.num_rows, config.rows_per_shard):
            num_rows = min(config.rows_per_shard, footer.num_rows - first)
            tars.append(PlannedTar(len(tars), path, first, num_rows))
    if not tars:
        raise RequestError(f"{config.input} holds no rows: there is nothing to download.")
    if len(tars) > MAX_SHARDS:
        raise RequestError(
            f"{config.input} makes {len(tars)} shards of {config.rows_per_shard} rows, and five digits name "
            f"{MAX_SHARDS}. Raise rows_per_shard."
        )
    settings = config.model_dump(mode="json", include={"rows_per_shard", "extra_columns", "images"})
    _keep_to_plan(config.output / PLAN_NAME, {"settings": settings, "inputs": inputs})
    return tars


def find_parquet(source: Path) -> list[Path]:
    """`source` itself, or the parquet files right inside it, by name.

    Raises:
        RequestError: there is no such place, or no parquet in it.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise RequestError(
            f"There is no file or folder {source}. Give the parquet files of selected rows with --input PATH."
        )
    if (source / WORK_NAME).exists():
        raise RequestError(f"The selection in {source} is not finished. Let `precompute.select` end first.")
    paths = sorted(path for path in source.glob("*.parquet") if not path.name.startswith((".", "_")))
    if not paths:
        raise RequestError(f"The folder {source} holds no *.parquet file. Give selected rows with --input PATH.")
    return paths


def _keep_to_plan(path: Path, now: dict[str, Any]) -> None:
    """`now`: `settings`, and of each of the `inputs` its name, rows and the hash of its footer."""
    if not path.exists():
        write_sealed_json(path, now)
        return
    try:
        before = read_sealed_json(path)
    except DamagedFile as error:
        raise RequestError(
            f"{error} Without it we cannot know which rows the tars beside it hold; restore it."
        ) from None
    for name, value in now["settings"].items():
        if before["settings"][name] != value:
            raise RequestError(
                f"{path.parent} was begun with {name} {before['settings'][name]}, not {value}: its shards would not go "
                "together. Keep to it, or choose another --output."
            )
    for index, (item, found) in enumerate(zip_longest(before["inputs"], now["inputs"])):
        if item is not None and found != item:
            what = f"{found['name']} with {found['num_rows']} rows" if found else "none"
            raise RequestError(
                f"{path.parent} was begun with {item['name']} of {item['num_rows']} rows as input file {index}; now "
                f"that is {what}, or has other rows. Files may be added after the last one; for other rows choose "
                "another --output."
            )
    if now["inputs"] != before["inputs"]:
        write_sealed_json(path, now)


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
