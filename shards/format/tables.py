"""The two small tables of a part: which samples it holds, and which it refused."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from shards.base.durable import DamagedFile
from shards.base.store import Store
from shards.format.receipts import FileRecord

SAMPLES_NAME = "samples.parquet"
REFUSED_NAME = "refused.parquet"
CAPTION_CHANGES = ("invalid_utf8", "control_characters", "too_long", "truncated")
"""What may have been done to a caption: bytes replaced, characters blanked, cut at `limits.max_caption_characters`, cut
by the tokenizer. The columns count a sample's captions."""
SAMPLES_SCHEMA = pa.schema(
    [("key", pa.string()), ("width", pa.int32()), ("height", pa.int32())]
    + [(score, pa.float32()) for score in ("aesthetic", "similarity", "punsafe", "pwatermark")]
    + [("captions", pa.int16())]
    + [(name, pa.int16()) for name in CAPTION_CHANGES]
    + [("url", pa.string()), ("sha256", pa.string())]
)
"""`url` and `sha256`, of the picture's file, by which samples can be excluded later."""
REFUSED_SCHEMA = pa.schema([(name, pa.string()) for name in ("key", "url", "reason", "detail")])
TOO_SMALL = "too_small"
OTHER_BUCKET = "other_bucket"
"""It is in another bucket of its aspect table: counted in the receipt, but no reject, and listed nowhere."""
Columns = dict[str, list[Any]]
"""Of a table, by name."""


def write_rows(path: Path | BinaryIO, schema: pa.Schema, rows: list[tuple[Any, ...]]) -> None:
    """Rows as tuples in the schema's order → a parquet file; the same rows give the same bytes."""
    columns = zip(*rows, strict=True) if rows else [() for _ in schema]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    pq.write_table(pa.table(arrays, schema=schema), path)


def read_recorded(store: Store, folder: str, files: Mapping[str, FileRecord], names: Sequence[str]) -> dict[str, bytes]:
    """Some of a part's files, as its receipt recorded them.

    Raises:
        DamagedFile: one is missing, or another.
    """
    places = {name: f"{folder}/{name}" for name in names}
    found = store.read_many(list(places.values()))
    for name, place in places.items():
        if hashlib.sha256(found.get(place, b"")).hexdigest() != files[name].sha256:
            where = store.where(place)
            raise DamagedFile(f"{where} is missing or damaged: it is not the file that its receipt recorded.")
    return {name: found[place] for name, place in places.items()}


def read_tables(store: Store, folder: str, files: Mapping[str, FileRecord]) -> tuple[Columns, Columns]:
    """A part's two tables: its samples, and those that it refused. Raises as `read_recorded`."""
    data = read_recorded(store, folder, files, (SAMPLES_NAME, REFUSED_NAME))
    stored, refused = (pq.read_table(io.BytesIO(table)).to_pydict() for table in data.values())
    return stored, refused
