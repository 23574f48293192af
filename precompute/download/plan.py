"""Which rows go into which tar: decided once per output folder, so that a row keeps its key for good."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from precompute.select.columns import find_columns
from precompute.select.inputs import footer_sha256
from shards.errors import RequestError
from shards.files import DamagedFile, read_sealed_json, write_sealed_json

PLAN_NAME = "download_plan.json"
MAX_SHARDS = 100_000  # five digits name a shard, and begin each key


@dataclass(frozen=True)
class InputFile:
    """A parquet file of rows to download, and the hash of its footer, which changes with its rows."""

    name: str
    num_rows: int
    footer_sha256: str


@dataclass(frozen=True)
class InputShard:
    """The rows [first_row, first_row + num_rows) of one input file, which become one tar."""

    shard_id: int
    file: Path
    first_row: int
    num_rows: int

    @property
    def name(self) -> str:
        return f"{self.shard_id:05d}"


def plan_download(source: Path, output: Path, rows_per_shard: int) -> list[InputShard]:
    """The shards of `source`, in order; what `output` was begun with is kept to.

    A shard never spans two files, so files may be added at the end between two runs.

    Raises:
        RequestError: no parquet there, one that cannot be read or lacks a URL or a TEXT column, no rows, too many
            shards, or `output` was begun with other rows or another `rows_per_shard`.
    """
    paths = find_parquet(source)
    inputs = [_inspect(path) for path in paths]
    pieces = [
        (path, first, min(rows_per_shard, item.num_rows - first))
        for path, item in zip(paths, inputs, strict=True)
        for first in range(0, item.num_rows, rows_per_shard)
    ]
    if not pieces:
        raise RequestError(f"{source} holds no rows: there is nothing to download.")
    if len(pieces) > MAX_SHARDS:
        raise RequestError(
            f"{source} makes {len(pieces)} shards of {rows_per_shard} rows; five digits name {MAX_SHARDS}. Raise rows_per_shard."
        )
    _keep_to_plan(output / PLAN_NAME, inputs, rows_per_shard)
    return [InputShard(shard_id, *piece) for shard_id, piece in enumerate(pieces)]


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
    paths = sorted(path for path in source.glob("*.parquet") if not path.name.startswith((".", "_")))
    if not paths:
        raise RequestError(f"The folder {source} holds no *.parquet file. Give selected rows with --input PATH.")
    return paths


def _inspect(path: Path) -> InputFile:
    try:
        metadata = pq.read_metadata(path)
        with path.open("rb") as file:
            footer = footer_sha256(file)
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"{path} cannot be read as parquet: {error}. Mend or remove it.") from None
    found = find_columns(metadata.schema.to_arrow_schema(), str(path))
    missing = [name for name in ("URL", "TEXT") if name not in found]
    if missing:
        names = ", ".join(metadata.schema.to_arrow_schema().names)
        raise RequestError(f"{path} has no {' and no '.join(missing)} column; it has {names}.")
    return InputFile(path.name, metadata.num_rows, footer)


def _keep_to_plan(path: Path, inputs: list[InputFile], rows_per_shard: int) -> None:
    now: dict[str, Any] = {"rows_per_shard": rows_per_shard, "inputs": [asdict(item) for item in inputs]}
    if not path.exists():
        write_sealed_json(path, now)
        return
    try:
        before = read_sealed_json(path)
    except DamagedFile as error:
        raise RequestError(
            f"{error} Without it we cannot know which rows the tars beside it hold; restore it."
        ) from None
    if before["rows_per_shard"] != rows_per_shard:
        raise RequestError(
            f"{path.parent} was begun with rows_per_shard {before['rows_per_shard']}, not {rows_per_shard}: keys would change. "
            "Keep to it, or choose another --output."
        )
    for index, item in enumerate(before["inputs"]):
        if index >= len(inputs) or now["inputs"][index] != item:
            found = f"{inputs[index].name} with {inputs[index].num_rows} rows" if index < len(inputs) else "nothing"
            raise RequestError(
                f"{path.parent} was begun with {item['name']} of {item['num_rows']} rows as input file {index}, and the "
                f"input now has {found} there (or other rows under that name). Files may be added after the last one; for "
                "other rows choose another --output."
            )
    if len(inputs) > len(before["inputs"]):
        write_sealed_json(path, now)
