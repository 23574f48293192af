"""Prompt files: one prompt per line, CSV (DrawBench), TSV (PartiPrompts, MLPerf's COCO list), JSON (COCO, MJHQ) and
parquet."""

import csv
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from shards.base.config import Config
from shards.base.errors import RequestError
from shards.base.store import LocalPath

TEXT_COLUMNS = ("prompt", "prompts", "caption", "text")
ID_COLUMNS = ("id", "key")
CATEGORY_COLUMN = "category"
QUOTED = re.compile(r'"((?:[^"]|"")*)"')
MAX_NAMED = 5
"""Maximum number of positions that an error message lists."""
PARSE_ERRORS = (
    *(ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError),
    *(csv.Error, pa.ArrowException),
)


class PromptsConfig(Config):
    """The prompts to sample."""

    file: LocalPath | None = None
    """Prompt file: .txt with one prompt per line, .csv, .tsv, .json (in the format of COCO captions or MJHQ) or
    .parquet."""
    column: str | None = None
    """Table column that contains the prompts. null: `prompt`, `prompts`, `caption` or `text`, ignoring case."""
    limit: int | None = Field(None, ge=1)
    """Number of prompts to use, from the start of the file. null: all prompts."""
    duplicates: Literal["refuse", "keep"] = "refuse"
    """How to handle repeated prompts in a file without ids. `refuse` stops with an error; `keep` samples each
    repetition with different noise."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, with an id that determines its noise."""

    id: str
    """Id given in the file, or else a hash of the text, which does not depend on the prompt's position."""
    text: str
    category: str | None = None


@dataclass(frozen=True)
class _Row:
    """An entry of a prompt file, not yet validated."""

    place: str
    """Position in the file for error messages, such as `line 17`."""
    text: Any
    id: Any = None
    category: Any = None


def read_prompts(config: PromptsConfig) -> list[Prompt]:
    """Read the prompts of a file, in file order.

    Raises:
        RequestError: the file does not exist, has an unknown format or cannot be parsed; or a prompt is empty, is not
            text, or appears twice.
    """
    if config.file is None:
        raise RequestError("No prompt file was given. Pass one with --prompts.file PATH or, for make, PROMPTS=PATH.")
    reader = READERS.get(config.file.suffix.lower())
    if reader is None:
        raise RequestError(
            f"{config.file} is not a supported prompt file: its name must end with one of {', '.join(READERS)}. "
            f"Convert it to one of these formats, or rename it."
        )
    try:
        rows = list(reader(config.file, config.column))
    except FileNotFoundError:
        raise RequestError(
            f"The prompt file {config.file} does not exist. Pass an existing file with --prompts.file PATH."
        ) from None
    except PARSE_ERRORS as error:
        raise RequestError(
            f"The prompt file {config.file} cannot be parsed: {type(error).__name__}: {error}. Fix the file and run "
            f"the command again."
        ) from error
    return _make_prompts(rows[: config.limit], config)


def prompts_sha256(prompts: list[Prompt]) -> str:
    """Return a hash that identifies a list of prompts, including their ids and their order."""
    return hashlib.sha256(json.dumps([asdict(prompt) for prompt in prompts]).encode()).hexdigest()


def _make_prompts(rows: list[_Row], config: PromptsConfig) -> list[Prompt]:
    """Validate the rows of a prompt file, and give each prompt an id."""
    not_text = [row.place for row in rows if row.text is not None and not _is_text(row.text)]
    if not_text:
        raise RequestError(
            f"{config.file} contains prompts that are not valid text ({_join(not_text)}). Replace them with UTF-8 "
            f"text. If the file is a table, check that prompts.column names the right column."
        )
    empty = [row.place for row in rows if not (row.text or "").strip()]
    if empty:
        raise RequestError(
            f"{config.file} contains empty prompts ({_join(empty)}). They would be sampled and counted in every "
            f"metric. Remove them."
        )
    if not rows:
        raise RequestError(f"{config.file} contains no prompts. Add some, or choose another file with --prompts.file.")
    places: dict[str, list[str]] = defaultdict(list)
    prompts = []
    for row in rows:
        text = row.text.strip()
        id = str(row.id) if row.id is not None else hashlib.sha256(text.encode()).hexdigest()[:16]
        earlier = len(places[id])
        places[id].append(row.place)
        if earlier and row.id is None and config.duplicates == "keep":
            id = f"{id}-{earlier + 1}"
        category = None if row.category in (None, "") else str(row.category)
        prompts.append(Prompt(id, text, category))
    duplicates = [" = ".join(found) for found in places.values() if len(found) > 1]
    if duplicates and len({prompt.id for prompt in prompts}) < len(prompts):
        raise RequestError(
            f"{config.file} contains duplicate prompts: {_join(duplicates)}. They would be sampled with the same "
            f"noise, and each repetition would count again in every metric. Remove the duplicates. To draw several "
            f"images per prompt, set sampling.images_per_prompt. If the duplicates are intended and the file has no "
            f"ids, set prompts.duplicates to `keep`."
        )
    return prompts


def _is_text(value: Any) -> bool:
    # UTF-8 cannot encode lone surrogates
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _join(places: list[str]) -> str:
    more = f" and {len(places) - MAX_NAMED} more" if len(places) > MAX_NAMED else ""
    return ", ".join(places[:MAX_NAMED]) + more


def _read_lines(path: Path, column: str | None) -> Iterator[_Row]:
    # split lines the way editors do: str.splitlines() would also split at form feeds and other characters
    text = path.read_text(encoding="utf-8-sig").removesuffix("\n")
    for number, line in enumerate(text.split("\n") if text else [], start=1):
        yield _Row(f"line {number}", line)


def _read_csv(path: Path, column: str | None, delimiter: str = ",") -> Iterator[_Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        is_tsv = delimiter == "\t"  # PartiPrompts' TSV contains unpaired quotation marks
        table = csv.DictReader(file, delimiter=delimiter, quoting=csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL)
        rows = ({name: _unquote(cell) for name, cell in row.items()} for row in table) if is_tsv else table
        yield from _read_table(list(table.fieldnames or []), rows, column, lambda _: f"line {table.line_num}")


def _unquote(cell: Any) -> Any:
    """Undo the quoting of a TSV cell, such as `"A ""stop"" sign"` in MLPerf's list, which pandas wrote."""
    match = QUOTED.fullmatch(cell) if isinstance(cell, str) else None  # a short row has None, and a long one a list
    return match[1].replace('""', '"') if match else cell


def _read_parquet(path: Path, column: str | None) -> Iterator[_Row]:
    table = pq.read_table(path)
    yield from _read_table(table.column_names, iter(table.to_pylist()), column, lambda number: f"row {number}")


def _read_table(
    names: list[str], rows: Iterator[dict[str, Any]], column: str | None, place: Callable[[int], str]
) -> Iterator[_Row]:
    by_name = {name.lower(): name for name in reversed(names)}
    wanted_names = TEXT_COLUMNS if column is None else (column.lower(),)
    text = next((by_name[name] for name in wanted_names if name in by_name), None)
    if text is None:
        wanted = " or ".join(TEXT_COLUMNS) if column is None else column
        raise ValueError(f"the table has no column {wanted}; its columns are {', '.join(names)}")
    id_column = next((by_name[name] for name in ID_COLUMNS if name in by_name), None)
    category_column = by_name.get(CATEGORY_COLUMN)
    for number, row in enumerate(rows, start=1):
        if None in row:
            raise ValueError(
                f"{place(number)} has more cells than the header. In a CSV file, put text with commas in quotes"
            )
        id, category = (None if name is None else row[name] for name in (id_column, category_column))
        yield _Row(place(number), row[text], id, category)


def _read_json(path: Path, column: str | None) -> Iterator[_Row]:
    content = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_reject_duplicate_keys)
    if "annotations" in content:  # COCO's captions
        for number, entry in enumerate(content["annotations"], start=1):
            yield _Row(f"annotation {number}", entry["caption"], entry["id"])
    else:  # MJHQ: {id: {"category": …, "prompt": …}}
        for key, entry in content.items():
            yield _Row(f"entry {key}", entry["prompt"], key, entry.get("category"))


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name} appears twice")
        found[name] = value
    return found


READERS: dict[str, Callable[[Path, str | None], Iterator[_Row]]] = {
    ".txt": _read_lines,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".json": _read_json,
    ".parquet": _read_parquet,
}
