"""Parquet tables of a part: the samples that it stores and those that it refused."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shards.base.durable import DamagedFile
from shards.base.store import Store
from shards.base.table import counted
from shards.format.receipts import FileRecord

SAMPLES_NAME = "samples.parquet"
REFUSED_NAME = "refused.parquet"
CAPTION_CHANGES = ("invalid_utf8", "control_characters", "too_long", "truncated")
"""Changes to captions: invalid bytes replaced, control characters blanked, text cut at `limits.max_caption_characters`,
tokens truncated by the tokenizer. For each change, a column of samples.parquet counts the sample's affected
captions."""
REFUSED_SCHEMA = pa.schema([(name, pa.string()) for name in ("key", "url", "reason", "detail")])
TOO_SMALL = "too_small"
OTHER_BUCKET = "other_bucket"
"""Refusal reason for an image that went to a different bucket of its aspect table. It is counted in the receipt, but
is not a reject and is not listed in refused.parquet."""
Columns = dict[str, list[Any]]
"""Table as a dict from column name to values."""


def samples_schema(scores: Sequence[str]) -> pa.Schema:
    """Return the schema of samples.parquet in a root with these scores. Samples can later be excluded by `url` and by
    `sha256`, the hash of the image file. Tables of older parts lack `license`."""
    return pa.schema(
        [("key", pa.string()), ("width", pa.int32()), ("height", pa.int32())]
        + [(score, pa.float32()) for score in scores]
        + [("captions", pa.int16())]
        + [(name, pa.int16()) for name in CAPTION_CHANGES]
        + [("url", pa.string()), ("sha256", pa.string()), ("license", pa.string())]
    )


def read_verified(store: Store, files: Mapping[str, str]) -> list[bytes]:
    """Read small files at once, given as name → SHA-256. Raises DamagedFile if one is missing or its SHA-256
    differs."""
    found, contents = store.read_many(list(files)), []
    for name, sha256 in files.items():
        contents.append(found.get(name, b""))
        if hashlib.sha256(contents[-1]).hexdigest() != sha256:
            raise DamagedFile(
                f"{store.where(name)} is missing or damaged: its SHA-256 does not match the recorded one. Restore it "
                f"from a backup."
            )
    return contents


def load_tables(store: Store, folder: str, files: Mapping[str, FileRecord]) -> tuple[pa.Table, pa.Table]:
    """Load a part's tables of stored and refused samples. Raises DamagedFile if one is missing or its SHA-256 differs
    from its record in `files`."""
    hashes = {f"{folder}/{name}": files[name].sha256 for name in (SAMPLES_NAME, REFUSED_NAME)}
    stored, refused = (pq.read_table(io.BytesIO(data)) for data in read_verified(store, hashes))
    return stored, refused


def read_tables(store: Store, folder: str, files: Mapping[str, FileRecord]) -> tuple[Columns, Columns]:
    """Read the same tables as `load_tables` into Python values, and raise the same error."""
    stored, refused = load_tables(store, folder, files)
    return stored.to_pydict(), refused.to_pydict()


def read_samples(store: Store, bucket: str, part: np.void, columns: Sequence[str]) -> pa.Table:
    """Read `key` and `columns` from the sample table of a part (a record of dtype `part_type`), in stored order. Raises
    DamagedFile if the table is missing or differs from the committed table, or if its row count differs from the part's
    sample count."""
    name = f"{bucket}/{part['folder'].decode()}/{SAMPLES_NAME}"
    (data,) = read_verified(store, {name: part["table"].decode()})
    table = pq.ParquetFile(io.BytesIO(data)).read([*dict.fromkeys(["key", *columns])], use_threads=False)
    if len(table) != part["samples"]:
        raise DamagedFile(
            f"{store.where(name)} has {counted(len(table), 'row')}, but the index lists "
            f"{counted(int(part['samples']), 'sample')}. Check the root with `python -m shards verify {store.where()}`."
        )
    return table
