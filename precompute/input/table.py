"""Captions and scores from tables with a row per sample, such as captions that a vision-language model wrote."""

import functools
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from pydantic import Field, model_validator

from precompute.input.parquet import StoreFile, is_number, open_parquet_file, plain_type
from precompute.input.unit import RawSample
from shards.base.config import Config
from shards.base.errors import RequestError, UnfitNode
from shards.base.store import Place
from shards.format.encoding import FALLBACK
from shards.open import open_store

LOOKED_UP_TOGETHER = 32
"""Number of samples whose rows are looked up together."""
CACHE_BYTES = 512 << 20
"""Size of a table's row groups that a process keeps in memory."""
MAX_WEIGHT = 100
LOADING = threading.Lock()
"""Held while a table is opened, so that threads that need the same table do not each read it."""


class ValueSource(Config):
    """A field of the samples, or a column of a table."""

    field: str | None = None
    """A field of the JSON beside the image, or a column of the image's row."""
    table: Place | None = None
    """Path or URL of a parquet file with a row per sample. It is best sorted in the order of the input, because a
    worker keeps only some row groups in memory."""
    key: str = "key"
    """Column of the table with the samples' keys."""
    column: str | None = None
    """Column of the table with the values."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"field": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.field is None) == (self.table is None):
            raise ValueError("set either `field` or `table`")
        if (self.table is None) != (self.column is None):
            raise ValueError("set `table` and `column` together")
        return self


class CaptionSource(ValueSource):
    """A source of captions: `txt`, which is the text file beside the image, another field of the samples, or a column
    of a table."""

    fallback: str | None = None
    """Field used for samples that the table lacks, such as `txt`. null: no fallback; a sample left without any caption
    is rejected."""
    weight: int = Field(1, ge=1, le=MAX_WEIGHT)
    """How often training draws this source, relative to the other sources."""

    @model_validator(mode="after")
    def _check_fallback(self) -> "CaptionSource":
        if self.column is not None and FALLBACK in self.column:
            raise ValueError(f"the column {self.column} contains {FALLBACK}; rename it in the table")
        if self.table is None and self.fallback is not None:
            raise ValueError("`fallback` requires `table`")
        return self


class ScoreSource(ValueSource):
    """A source of scores, which are numbers: a field of the samples, or a column of a table."""

    @property
    def name(self) -> str:
        """Name of the score in the root, and in `data.filter`."""
        return (self.field or self.column or "").removeprefix("json:")


@dataclass(frozen=True)
class TableConfig:
    """The columns of a table that a job uses, as workers need them."""

    place: str
    """Path or URL of the parquet file."""
    key: str
    texts: tuple[str, ...]
    """Columns with captions."""
    numbers: tuple[str, ...]
    """Columns with scores."""
    sha256: str
    """SHA-256 of the file, as the driver saw it."""

    @property
    def identity(self) -> str:
        """Identifier of the table in encoding.json: the file's SHA-256, followed by ` by KEY` unless the key column is
        named `key`."""
        return self.sha256 if self.key == "key" else f"{self.sha256} by {self.key}"

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns except the key, captions first."""
        return self.texts + self.numbers


Row = list[str | float | None]
"""Values of a table's columns, in the order of `TableConfig.columns`."""


@dataclass
class Table:
    """The values of a table, by key. Only keys' hashes and some row groups are in memory.

    The index takes 16 bytes per row. Threads may share a table.
    """

    config: TableConfig
    hashes: np.ndarray
    """(rows,) uint64 hashes of the keys, sorted."""
    rows: np.ndarray
    """(rows,) int64 number of the row of each hash."""
    starts: np.ndarray
    """(row groups + 1,) int64 number of the first row of each row group."""
    parquet: pq.ParquetFile
    cache: OrderedDict[int, list[pa.Array]] = field(default_factory=OrderedDict)
    """Row group → keys, and the values of each column; the least recently used first."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, config: TableConfig) -> "Table":
        """Read the keys of a table.

        Raises:
            RequestError: the file is not parquet, lacks a column, or has a key twice.
            UnfitNode: it is not the file that the driver saw.
        """
        if config.sha256 and sha256_of(config.place) != config.sha256:
            raise UnfitNode(
                f"The table {config.place} is missing on {os.uname().nodename}, or differs from the driver's file. Use "
                f"the same file at the same path on all nodes, and do not change it during the job."
            )
        parquet = open_parquet(config)
        metadata = parquet.metadata
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        hashes = np.empty(metadata.num_rows, np.uint64)
        place = 0
        for batch in parquet.iter_batches(columns=[config.key]):
            keys = [_decoded(key) for key in batch.column(0).cast(pa.large_binary())]
            hashes[place : place + len(keys)] = [_hash(key) for key in keys]
            place += len(keys)
        order = np.argsort(hashes, kind="stable")
        table = cls(config, hashes[order], order, np.cumsum([0, *counts]), parquet)
        table._refuse_duplicates()
        return table

    def look_up(self, keys: Sequence[str]) -> list[Row]:
        """Return the row of each key. A key that the table lacks has a row of None."""
        with self.lock:
            return [self._look_up(key) for key in keys]

    def _look_up(self, key: str) -> Row:
        wanted = np.uint64(_hash(key))
        for place in range(int(np.searchsorted(self.hashes, wanted)), len(self.hashes)):
            if self.hashes[place] != wanted:
                break
            found, values = self._row(int(self.rows[place]))
            if found == key:
                return values
        return [None] * len(self.config.columns)

    def _row(self, row: int) -> tuple[str | None, Row]:
        group = int(np.searchsorted(self.starts, row, side="right")) - 1
        if group in self.cache:
            self.cache.move_to_end(group)
        else:
            wanted = [self.config.key, *self.config.columns]
            table = self.parquet.read_row_group(group, wanted, use_threads=False)
            kinds = [pa.large_binary()] * (1 + len(self.config.texts)) + [pa.float64()] * len(self.config.numbers)
            columns = zip(wanted, kinds, strict=True)
            self.cache[group] = [table.column(name).cast(kind, safe=False).combine_chunks() for name, kind in columns]
            while len(self.cache) > 1 and sum(a.nbytes for arrays in self.cache.values() for a in arrays) > CACHE_BYTES:
                self.cache.popitem(last=False)
        place = row - int(self.starts[group])
        key, *values = (array[place] for array in self.cache[group])
        texts, numbers = values[: len(self.config.texts)], values[len(self.config.texts) :]
        return _decoded(key), [*map(_decoded, texts), *(number.as_py() for number in numbers)]

    def _refuse_duplicates(self) -> None:
        for place in np.flatnonzero(self.hashes[1:] == self.hashes[:-1]):
            first, second = (self._row(int(self.rows[place + step])) for step in (0, 1))
            if first[0] == second[0]:
                raise RequestError(
                    f"{self.config.place} has the key {first[0]!r} twice, in rows {self.rows[place]} and "
                    f"{self.rows[place + 1]} (counted from 0), so it is not clear which row to use. Keep one of them."
                )


def open_parquet(config: TableConfig) -> pq.ParquetFile:
    """Open a table's parquet file.

    Raises:
        RequestError: the file does not exist or is not parquet, or a column is missing or has an unsuitable type.
    """
    place = config.place
    folder, _, name = place.rpartition("/")
    store = open_store(folder or "/")
    size = store.size(name)
    if size is None:
        raise RequestError(f"The table {place} does not exist. Check `captions` and `scores` in the config.")
    try:
        parquet = open_parquet_file(StoreFile(store, name, size))
    except (pa.ArrowException, OSError) as error:
        raise RequestError(
            f"The table {place} is not a readable parquet file: {' '.join(str(error).split())}. Convert other formats "
            f"with pyarrow or pandas."
        ) from error
    schema = parquet.schema_arrow
    for column in (config.key, *config.columns):
        if column not in schema.names:
            raise RequestError(
                f"The table {place} has no column {column}; its columns are {', '.join(schema.names)}. Set `key` and "
                f"`column` to two of them."
            )
        kind, is_score = schema.field(column).type, column in config.numbers
        if not (is_number(kind) or pa.types.is_boolean(kind) if is_score else plain_type(kind) == pa.string()):
            raise RequestError(
                f"The column {column} of {place} has values of type {kind}, not {'numbers' if is_score else 'text'}."
            )
    return parquet


def _decoded(value: pa.Scalar) -> str | None:
    """Decode a text. Invalid UTF-8 stays recognisable, and affects only the text that contains it."""
    data = value.as_py()
    return None if data is None else data.decode("utf-8", "surrogateescape")


def sha256_of(place: str) -> str | None:
    """Return the SHA-256 of a file at a path or URL, or None if it does not exist."""
    folder, _, name = place.rpartition("/")
    store = open_store(folder or "/")
    return None if store.size(name) is None else store.sha256(name)


def _hash(key: str | None) -> int:
    return xxhash.xxh3_64_intdigest((key or "").encode("utf-8", "surrogatepass"))


def load_table(config: TableConfig) -> Table:
    """Open a table, and keep it for the next call in this process."""
    with LOADING:
        return _load(config)


@functools.cache
def _load(config: TableConfig) -> Table:
    return Table.open(config)


def with_tables(
    samples: Iterable[RawSample], tables: Sequence[TableConfig], found: Counter[str] | None = None
) -> Iterator[RawSample]:
    """Add the values of `tables` to samples, in order.

    Args:
        found: counts the samples that have a value in a table, by column.
    """
    if not tables:
        yield from samples
        return
    stream = iter(samples)
    while group := list(islice(stream, LOOKED_UP_TOGETHER)):
        for config in tables:
            rows = load_table(config).look_up([sample.key for sample in group])
            for sample, row in zip(group, rows, strict=True):
                values = dict(zip(config.columns, row, strict=True))
                sample.tables |= values
                if found is not None:
                    found.update(column for column, value in values.items() if value is not None)
        yield from group


def describe_tables(captions: Iterable[CaptionSource], scores: Iterable[ScoreSource]) -> tuple[TableConfig, ...]:
    """Check the tables that are sources of captions or scores, and describe them for workers.

    Raises:
        RequestError: a table does not exist, is not parquet, lacks a column, or has a key twice; or two sources are
            columns of the same name.
    """
    columns: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    used: set[str] = set()
    for source in (*captions, *scores):
        if source.table is None:
            continue
        assert source.column is not None
        if source.column in used:
            raise RequestError(
                f"Two table columns in `captions` and `scores` are both named {source.column}. Rename one of them."
            )
        used.add(source.column)
        place = str(source.table.absolute() if isinstance(source.table, Path) else source.table)
        texts, numbers = columns.setdefault((place, source.key), ([], []))
        (numbers if isinstance(source, ScoreSource) else texts).append(source.column)
    tables = []
    for (place, key), (texts, numbers) in columns.items():
        table = TableConfig(place, key, tuple(texts), tuple(numbers), "")
        Table.open(table)  # refuses duplicate keys before anything is written
        tables.append(replace(table, sha256=sha256_of(place) or ""))
    return tuple(tables)


def table_settings(
    tables: Sequence[TableConfig], found: Counter[str] | None = None
) -> dict[str, str | int | float | bool]:
    """Return the settings that a receipt records for tables: the file of each column, and the number of samples that
    have a value in it."""
    columns = {column: table.place for table in tables for column in table.columns}
    settings: dict[str, str | int | float | bool] = {f"tables.{column}": place for column, place in columns.items()}
    return settings | {f"tables.{column}.found": found[column] for column in columns if found is not None}
