"""Assignment of rows to tars, and the rows of a tar as img2dataset expects them.

The assignment is fixed when the download into an output folder starts, so that each row keeps its key. img2dataset
reads an Arrow file with the columns `url`, `caption` and any extra ones.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.download.config import DownloadConfig
from precompute.input.parquet import is_number, plain_type
from precompute.select.metadata import WORK_NAME, find_columns, read_footer
from shards.base.durable import DamagedFile, output_errors, read_sealed_json, write_sealed_json
from shards.base.errors import RequestError, WorkError

PLAN_NAME = "download_plan.json"
MAX_TARS = 100_000  # a tar's name has five digits, and its keys start with its name
# Names of the columns that img2dataset itself adds.
RESERVED = {
    *("key", "caption", "url", "width", "height", "original_width", "original_height", "status", "error_message"),
    *("exif", "md5", "sha256", "sha512"),
}


@dataclass(frozen=True)
class PlannedTar:
    """A tar to download: the rows [first_row, first_row + num_rows) of one input file."""

    shard_id: int
    file: Path
    first_row: int
    num_rows: int

    @property
    def name(self) -> str:
        return f"{self.shard_id:05d}"


def plan_download(config: DownloadConfig) -> list[PlannedTar]:
    """Plan the tars for the rows of `config.input`, in order, and record the plan in `config.output`.

    A tar never spans two input files, so new files may be added after the existing ones between runs.

    Raises:
        RequestError: There are no parquet files or no rows; a file cannot be read, or its columns are unsuitable (see
            `name_columns`); there are too many tars; or `config.output` has a plan with different rows or settings.
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
        raise RequestError(f"{config.input} contains no rows, so there is nothing to download. Check --input.")
    if len(tars) > MAX_TARS:
        raise RequestError(
            f"{config.input} needs {len(tars)} tars with rows_per_shard = {config.rows_per_shard}, but the limit is "
            f"{MAX_TARS}, because tar names have five digits. Raise rows_per_shard."
        )
    settings = config.model_dump(mode="json", include={"rows_per_shard", "extra_columns", "images"})
    _keep_to_plan(config.output / PLAN_NAME, {"settings": settings, "inputs": inputs})
    return tars


def find_parquet(source: Path) -> list[Path]:
    """Return `source` itself if it is a file, or else the parquet files directly in it, sorted by name. Raises
    RequestError if there are none, or if `source` is an unfinished selection."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise RequestError(
            f"There is no file or folder {source}. Pass the parquet files of selected rows with --input PATH."
        )
    if (source / WORK_NAME).exists():
        raise RequestError(f"The selection in {source} is not finished. Run `precompute.select` to completion first.")
    paths = sorted(path for path in source.glob("*.parquet") if not path.name.startswith((".", "_")))
    if not paths:
        raise RequestError(f"The folder {source} contains no *.parquet file. Pass selected rows with --input PATH.")
    return paths


def _keep_to_plan(path: Path, now: dict[str, Any]) -> None:
    """Check that the plan `now` agrees with the plan recorded at `path`, if any, and record it. A plan consists of
    `settings`, and `inputs` with the name, number of rows and footer hash of each file."""
    if not path.exists():
        with output_errors(f"The output folder {path.parent} cannot be written", "Choose a writable --output."):
            write_sealed_json(path, now)
        return
    try:
        before = read_sealed_json(path)
    except DamagedFile as error:
        raise RequestError(
            f"{error} Without this file, the rows of the existing tars are unknown. If you have no backup, choose a "
            f"different --output."
        ) from None
    for name, value in now["settings"].items():
        if before["settings"][name] != value:
            raise RequestError(
                f"The download in {path.parent} was started with {name} = {before['settings'][name]}, but {name} is "
                f"now {value}. All its tars must have the same settings. Restore the earlier value, or choose a "
                "different --output."
            )
    for index, (item, found) in enumerate(zip_longest(before["inputs"], now["inputs"])):
        if item is not None and found != item:
            instead = f"{found['name']} with {found['num_rows']} rows" if found else "missing"
            differs = "" if found is None else " (the name, the number of rows or the rows themselves have changed)"
            raise RequestError(
                f"The download in {path.parent} was started with {item['name']} ({item['num_rows']} rows) as input "
                f"file {index}, but input file {index} is now {instead}{differs}. Files may only be added after the "
                "last one. For different rows, choose a different --output."
            )
    if now["inputs"] != before["inputs"]:
        write_sealed_json(path, now)


def name_columns(schema: pa.Schema, extra_columns: list[str] | None, place: str) -> dict[str, str]:
    """Choose the columns of `schema` to store, and return a dict from each column's name in the file to its name in
    tars.

    The spellings of LAION's columns are unified, and names that img2dataset reserves get the prefix `source_`. The text
    and URL columns come last, under img2dataset's names `caption` and `url`.

    Raises:
        RequestError: The URL or TEXT column is missing, `extra_columns` names a missing column, JSON cannot represent a
            column's type, or two columns would get the same name.
    """
    found = find_columns(schema, place)
    missing = [name for name in ("URL", "TEXT") if name not in found]
    if missing:
        raise RequestError(
            f"{place} has no {' and no '.join(missing)} column. Its columns are {', '.join(schema.names)}."
        )
    known = {spelling: name for name, spelling in found.items()}
    core = {found["TEXT"]: "caption", found["URL"]: "url"}
    names = {}
    for column in schema.names if extra_columns is None else extra_columns:
        if column not in schema.names:
            raise RequestError(
                f"{place} has no column `{column}`, which extra_columns names. Its columns are "
                f"{', '.join(schema.names)}."
            )
        name = known.get(column, column)
        names[column] = f"source_{name}" if name in RESERVED else name
    names |= core
    _check_types(schema, names, place)
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise RequestError(
            f"{place}: two columns would be stored as `{twice[0]}`. List the columns to store with --extra_columns a,b."
        )
    return {column: name for column, name in names.items() if column not in core} | core


def _check_types(schema: pa.Schema, names: dict[str, str], place: str) -> None:
    for column, name in names.items():
        kind = plain_type(schema.field(column).type)
        is_text = pa.types.is_string(kind) or pa.types.is_null(kind)
        is_core = name in ("url", "caption")
        item = kind
        while pa.types.is_list(item) or pa.types.is_large_list(item) or pa.types.is_fixed_size_list(item):
            item = item.value_type
        if not is_text and (is_core or not (pa.types.is_boolean(item) or is_number(item))):
            raise RequestError(
                f"{place}: the column `{column}` has type {kind}, so it cannot be stored as {name}. The columns "
                "caption and url must be strings; other columns must be strings, numbers, booleans, or lists of "
                "numbers. List the columns to store with --extra_columns a,b."
            )


def read_rows(tar: PlannedTar, extra_columns: list[str] | None) -> pa.Table:
    """Read a tar's rows, with the column names used in tars.

    Raises:
        RequestError: The columns are unsuitable; see `name_columns`.
        WorkError: The file is damaged, or contains text that is not UTF-8.
    """
    try:
        with pq.ParquetFile(tar.file) as file:
            names = name_columns(file.schema_arrow, extra_columns, str(tar.file))
            groups, skipped = _row_groups(file.metadata, tar)
            table = file.read_row_groups(groups, columns=list(names))
        table = table.slice(tar.first_row - skipped, tar.num_rows).select(list(names))
        table = table.cast(pa.schema([(field.name, plain_type(field.type)) for field in table.schema]))
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        rows = f"{tar.first_row} to {tar.first_row + tar.num_rows}"
        raise WorkError(f"{tar.file} cannot be read at rows {rows}: {error}. Repair or replace the file") from error
    return table.rename_columns(list(names.values()))


def _row_groups(metadata: pq.FileMetaData, tar: PlannedTar) -> tuple[list[int], int]:
    """Return the indices of the row groups that contain the tar's rows, and the number of rows before the first of
    these groups."""
    starts = np.cumsum([0, *(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))])
    first = np.searchsorted(starts[1:], tar.first_row, side="right")
    end = np.searchsorted(starts[:-1], tar.first_row + tar.num_rows)
    return list(range(first, end)), int(starts[first])
