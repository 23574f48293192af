"""Tables with a row per image: metadata.jsonl, .csv or .parquet in a folder, or the JSON of kohya's scripts."""

import csv
import functools
import io
import json
import posixpath
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from precompute.input.parquet import open_parquet_file, to_list, to_rows
from shards.base.errors import DamagedInput
from shards.open import open_store

KEY = "file_name"
"""Column with the path of an image, relative to the table."""


@dataclass(frozen=True)
class Rows:
    """The rows of a table by the name of their image. Rows are parsed only when needed."""

    stored: dict[str, Any]
    parse: Callable[[Any], dict[str, Any]]
    """Function that turns a stored row into its values by column."""

    def get(self, name: str) -> dict[str, Any]:
        """Return an image's values that are not null, or an empty dict if it has no row."""
        row = self.stored.get(name)
        values = {} if row is None else self.parse(row)
        return {column: value for column, value in values.items() if value is not None and column != KEY}


@functools.lru_cache(maxsize=8)
def load_rows(place: str, name: str, num_bytes: int) -> Rows:
    """Read a table from the store at `place`. `num_bytes` is the file's size, so that a changed file is read again.

    Raises DamagedInput if the file cannot be parsed, lacks the column `file_name`, or lists an image twice.
    """
    where, suffix = open_store(place).where(name), PurePosixPath(name).suffix
    try:
        rows, parse = READERS[suffix](open_store(place).read(name))
        stored: dict[str, Any] = {}
        for number, (image, row) in enumerate(rows, 1):
            if not isinstance(image, str):
                raise ValueError(f"row {number} has the {KEY} {image!r}, which is not text")
            if stored.setdefault(posixpath.normpath(image.replace("\\", "/")), row) is not row:
                raise ValueError(f"row {number} lists {image!r}, which an earlier row lists, too")
    except (pa.ArrowException, ValueError, LookupError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        raise DamagedInput(
            f"{where} cannot be read as a table with a row per image: {' '.join(str(error).split())}. Correct the file."
        ) from error
    return Rows(stored, parse)


Read = tuple[Iterator[tuple[Any, Any]], Callable[[Any], dict[str, Any]]]
"""(name of the image, stored row) of each row, and the function that parses a stored row."""


def _read_jsonl(data: bytes) -> Read:
    def rows() -> Iterator[tuple[Any, Any]]:
        for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
            if line.strip():
                try:
                    yield _parse_line(line)[KEY], line
                except KeyError:
                    raise ValueError(f"line {number} has no field {KEY}") from None
                except (ValueError, TypeError) as error:
                    raise ValueError(f"line {number} is not a JSON object: {error}") from error

    return rows(), _parse_line


def _parse_line(line: bytes) -> dict[str, Any]:
    value = json.loads(line.decode("utf-8", "surrogateescape"))
    if not isinstance(value, dict):
        raise TypeError(f"it is a {type(value).__name__}")
    return value


def _read_csv(data: bytes) -> Read:
    lines = csv.reader(io.StringIO(data.decode("utf-8-sig", "surrogateescape"), newline=""), strict=True)
    header = next(lines, [])
    place = _place_of_key(header)

    def rows() -> Iterator[tuple[Any, Any]]:
        for row in lines:
            if row:
                if len(row) != len(header):
                    raise ValueError(f"line {lines.line_num} has {len(row)} fields instead of {len(header)}")
                yield row[place], row

    def parse(row: list[str]) -> dict[str, Any]:
        return {name: text for name, text in zip(header, row, strict=True) if text}

    return rows(), parse


def _read_parquet(data: bytes) -> Read:
    table = open_parquet_file(io.BytesIO(data)).read()
    names = to_list(table.column(_place_of_key(table.column_names)))

    def parse(row: int) -> dict[str, Any]:
        return to_rows(table.slice(row, 1))[0]

    return ((name, row) for row, name in enumerate(names)), parse


def _place_of_key(columns: list[str]) -> int:
    if len(set(columns)) < len(columns):
        raise ValueError("two columns have the same name")
    if KEY not in columns:
        raise ValueError(f"it has no column {KEY}, but only {', '.join(columns)}")
    return columns.index(KEY)


def _read_kohya(data: bytes) -> Read:
    images = json.loads(data)
    if not isinstance(images, dict) or not all(isinstance(fields, dict) for fields in images.values()):
        raise ValueError("it does not map names of images to fields")
    return iter(images.items()), lambda fields: fields


READERS: dict[str, Callable[[bytes], Read]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".json": _read_kohya,
}
