"""Prompt files: text lines, CSV (DrawBench), TSV (PartiPrompts, MLPerf's COCO list), JSON (COCO, MJHQ), parquet."""

import csv
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from shards.base.config import Config
from shards.base.errors import RequestError

TEXT_COLUMNS = ("prompt", "prompts", "caption", "text")
ID_COLUMNS = ("id", "key")
CATEGORY_COLUMN = "category"
MOST_NAMED = 5


class PromptsConfig(Config):
    """Which prompts are sampled."""

    file: Path | None = None
    """Text (.txt, a prompt a line), .csv, .tsv, .json (COCO's captions, MJHQ's) or .parquet."""
    column: str | None = None
    """Of a table: where the prompts are; null: `prompt`, `prompts`, `caption` or `text`, in any case of letters."""
    limit: int | None = Field(None, ge=1)
    """The first so many; null: all."""
    duplicates: Literal["refuse", "keep"] = "refuse"
    """Of one prompt that stands there twice without ids of its own: `keep` samples it twice, with noise of its own."""


@dataclass(frozen=True)
class Prompt:
    """A text to sample, and the id that its noise is keyed by."""

    id: str
    """The file's own, where it has ids; else a hash of the text, which a line more above it does not change."""
    text: str
    category: str | None = None


@dataclass(frozen=True)
class _Row:
    place: str
    """For people: `line 17`."""
    text: Any
    id: Any = None
    category: Any = None


def read_prompts(config: PromptsConfig) -> list[Prompt]:
    """The prompts of a file, in its order.

    Raises:
        RequestError: no such file, not of a known layout, a prompt without text, or one that stands there twice.
    """
    if config.file is None:
        raise RequestError("No prompts were given. Name a file of them: --prompts.file PATH, or make's PROMPTS=PATH.")
    reader = READERS.get(config.file.suffix.lower())
    if reader is None:
        raise RequestError(f"{config.file} is no prompt file: its name must end in {', '.join(READERS)}.")
    try:
        rows = list(reader(config.file, config.column))
    except FileNotFoundError:
        raise RequestError(f"There is no prompt file {config.file}. Give the right path as --prompts.file.") from None
    except (
        *(ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError, csv.Error, pa.ArrowException),
    ) as error:
        raise RequestError(
            f"The prompt file {config.file} cannot be read: {type(error).__name__}: {error}. Mend it and try again."
        ) from error
    return _checked(rows[: config.limit], config)


def prompts_sha256(prompts: list[Prompt]) -> str:
    """What stands for a list of prompts: their ids and texts, in order."""
    return hashlib.sha256(json.dumps([asdict(prompt) for prompt in prompts]).encode()).hexdigest()


def _checked(rows: list[_Row], config: PromptsConfig) -> list[Prompt]:
    other = [row.place for row in rows if row.text is not None and not is_text(row.text)]
    if other:
        raise RequestError(
            f"{config.file} has what is no text in place of a prompt, at {_named(other)}. Give texts there, in UTF-8; "
            f"of a table, the column that has them is named by prompts.column."
        )
    empty = [row.place for row in rows if not (row.text or "").strip()]
    if empty or not rows:
        where = f"at {_named(empty)}" if empty else "anywhere in it"
        raise RequestError(
            f"{config.file} has no prompt {where}. An empty prompt would be sampled as any other and count in every "
            f"metric: remove it."
        )
    places: dict[str, list[str]] = defaultdict(list)
    prompts = []
    for row in rows:
        text = row.text.strip()
        own = str(row.id) if row.id is not None else hashlib.sha256(text.encode()).hexdigest()[:16]
        before = len(places[own])
        places[own].append(row.place)
        is_again = before and row.id is None and config.duplicates == "keep"
        prompts.append(Prompt(f"{own}-{before + 1}" if is_again else own, text, row.category and str(row.category)))
    twice = [" = ".join(found) for found in places.values() if len(found) > 1]
    if twice and len({prompt.id for prompt in prompts}) < len(prompts):
        raise RequestError(
            f"{config.file} has prompts twice: {_named(twice)}. Each would count twice in every metric, with the same "
            f"noise. Remove the second; for more pictures of each prompt set sampling.images_per_prompt; or, where the "
            f"file is meant to be so and has no ids, set prompts.duplicates to keep."
        )
    return prompts


def is_text(value: Any) -> bool:
    """Whether it is one that can be written as UTF-8: half of a surrogate pair cannot."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _named(places: list[str]) -> str:
    more = f" and {len(places) - MOST_NAMED} more" if len(places) > MOST_NAMED else ""
    return ", ".join(places[:MOST_NAMED]) + more


def _lines(path: Path, column: str | None) -> Iterator[_Row]:
    # as editors count lines: str.splitlines() would also cut at a form feed, and at three more
    text = path.read_text(encoding="utf-8-sig").removesuffix("\n")
    for number, line in enumerate(text.split("\n") if text else [], start=1):
        yield _Row(f"line {number}", line)


def _csv(path: Path, column: str | None, delimiter: str = ",") -> Iterator[_Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        # PartiPrompts has lone quotation marks
        table = csv.DictReader(file, delimiter=delimiter, quoting=csv.QUOTE_NONE if delimiter == "\t" else 0)
        yield from _table(list(table.fieldnames or []), table, column, lambda _: f"line {table.line_num}")


def _tsv(path: Path, column: str | None) -> Iterator[_Row]:
    return _csv(path, column, "\t")


def _parquet(path: Path, column: str | None) -> Iterator[_Row]:
    table = pq.read_table(path)
    yield from _table(table.column_names, iter(table.to_pylist()), column, lambda number: f"row {number}")


def _table(
    names: list[str], rows: Iterator[dict[str, Any]], column: str | None, place: Callable[[int], str]
) -> Iterator[_Row]:
    by_name = {name.lower(): name for name in reversed(names)}
    text = by_name.get((column or next((n for n in TEXT_COLUMNS if n in by_name), "")).lower())
    if text is None:
        raise ValueError(f"it has no column {column or ' or '.join(TEXT_COLUMNS)}, only {', '.join(names)}")
    own = next((by_name[name] for name in ID_COLUMNS if name in by_name), "")
    category = by_name.get(CATEGORY_COLUMN, "")
    for number, row in enumerate(rows, start=1):
        if None in row:
            raise ValueError(f"{place(number)} has more cells than there are columns: put text with commas into quotes")
        yield _Row(place(number), row[text], row.get(own), row.get(category))


def _json(path: Path, column: str | None) -> Iterator[_Row]:
    content = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_each_once)
    if "annotations" in content:  # COCO's captions
        for number, entry in enumerate(content["annotations"], start=1):
            yield _Row(f"annotation {number}", entry["caption"], entry["id"])
    else:  # MJHQ: {id: {"category": …, "prompt": …}}
        for key, entry in content.items():
            yield _Row(f"entry {key}", entry["prompt"], key, entry.get("category"))


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} stands there twice")
    return found


READERS: dict[str, Callable[[Path, str | None], Iterator[_Row]]] = {
    ".txt": _lines,
    ".csv": _csv,
    ".tsv": _tsv,
    ".json": _json,
    ".parquet": _parquet,
}
