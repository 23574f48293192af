"""Which rows go into which tar: decided once per output folder, so that a row keeps its key for good."""

from itertools import zip_longest
from pathlib import Path
from typing import Any

from precompute.download.config import DownloadConfig
from precompute.download.rows import PlannedTar, name_columns
from precompute.select.metadata import WORK_NAME, read_footer
from shards.base.durable import DamagedFile, read_sealed_json, write_sealed_json
from shards.base.errors import RequestError

PLAN_NAME = "download_plan.json"
MAX_SHARDS = 100_000  # five digits name a shard, and begin each key


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
