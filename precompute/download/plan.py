"""Which rows go into which tar: decided once per output folder, so that a row keeps its key for good."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from precompute.download.config import DownloadConfig
from precompute.download.rows import PlannedTar, name_columns
from precompute.select.metadata.inputs import WORK_NAME, footer_sha256
from shards.base.durable import DamagedFile, read_sealed_json, write_sealed_json
from shards.base.errors import RequestError

PLAN_NAME = "download_plan.json"
MAX_SHARDS = 100_000  # five digits name a shard, and begin each key


@dataclass(frozen=True)
class InputFile:
    """A parquet file of rows to download, and the hash of its footer, which changes with its rows."""

    name: str
    num_rows: int
    footer_sha256: str


def plan_download(config: DownloadConfig) -> list[PlannedTar]:
    """The shards of `config.input`, in order; what `config.output` was begun with is kept to.

    A shard never spans two files, so files may be added at the end between two runs.

    Raises:
        RequestError: no parquet there, one that cannot be read or whose columns do not fit (see `name_columns`), no
            rows, too many shards, or the output was begun with other rows or settings.
    """
    source, rows_per_shard = config.input, config.rows_per_shard
    paths = find_parquet(source)
    inputs = [_inspect(path, config.extra_columns) for path in paths]
    pieces = [
        (path, first, min(rows_per_shard, item.num_rows - first))
        for path, item in zip(paths, inputs, strict=True)
        for first in range(0, item.num_rows, rows_per_shard)
    ]
    if not pieces:
        raise RequestError(f"{source} holds no rows: there is nothing to download.")
    if len(pieces) > MAX_SHARDS:
        raise RequestError(
            f"{source} makes {len(pieces)} shards of {rows_per_shard} rows, and five digits name {MAX_SHARDS}. "
            "Raise rows_per_shard."
        )
    settings = config.model_dump(mode="json", include={"rows_per_shard", "extra_columns", "images"})
    _keep_to_plan(config.output / PLAN_NAME, inputs, settings)
    return [PlannedTar(shard_id, *piece) for shard_id, piece in enumerate(pieces)]


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


def _inspect(path: Path, extra_columns: list[str] | None) -> InputFile:
    try:
        metadata = pq.read_metadata(path)
        with path.open("rb") as file:
            footer = footer_sha256(file)
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"{path} cannot be read as parquet: {error}. Mend or remove it.") from None
    name_columns(metadata.schema.to_arrow_schema(), extra_columns, str(path))
    return InputFile(path.name, metadata.num_rows, footer)


def _keep_to_plan(path: Path, inputs: list[InputFile], settings: dict[str, Any]) -> None:
    now: dict[str, Any] = {"settings": settings, "inputs": [asdict(item) for item in inputs]}
    if not path.exists():
        write_sealed_json(path, now)
        return
    try:
        before = read_sealed_json(path)
    except DamagedFile as error:
        raise RequestError(
            f"{error} Without it we cannot know which rows the tars beside it hold; restore it."
        ) from None
    for name, value in settings.items():
        if before["settings"][name] != value:
            raise RequestError(
                f"{path.parent} was begun with {name} {before['settings'][name]}, not {value}: its shards would not go "
                "together. Keep to it, or choose another --output."
            )
    for index, item in enumerate(before["inputs"]):
        if index >= len(inputs) or now["inputs"][index] != item:
            found = "none"
            if index < len(inputs):
                found = f"{inputs[index].name} with {inputs[index].num_rows} rows"
            raise RequestError(
                f"{path.parent} was begun with {item['name']} of {item['num_rows']} rows as input file {index}; now "
                f"that is {found}, or has other rows. Files may be added after the last one; for other rows choose "
                "another --output."
            )
    if len(inputs) > len(before["inputs"]):
        write_sealed_json(path, now)
