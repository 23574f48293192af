"""The two small tables of a part, which samples it holds and which it refused, and the rejects they add up to."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SAMPLES_NAME = "samples.parquet"
REFUSED_NAME = "refused.parquet"
MENDED = ("invalid_utf8", "control_characters", "too_long", "truncated")
"""What may have been done to a caption: bytes replaced, characters blanked, cut at `limits.max_caption_characters`, cut
by the tokenizer. The columns count a sample's captions."""
TABLES = (SAMPLES_NAME, REFUSED_NAME)
SAMPLES_SCHEMA = pa.schema(
    [("key", pa.string()), ("width", pa.int32()), ("height", pa.int32())]
    + [(score, pa.float32()) for score in ("aesthetic", "similarity", "punsafe", "pwatermark")]
    + [("captions", pa.int16())]
    + [(name, pa.int16()) for name in MENDED]
    + [("url", pa.string()), ("sha256", pa.string())]
)
"""`url` and `sha256`, of the picture's file, by which samples can be excluded later; the first roots lack them."""
REFUSED_SCHEMA = pa.schema([(name, pa.string()) for name in ("key", "url", "reason", "detail")])
REJECTS_SCHEMA = pa.schema([(name, pa.string()) for name in ("key", "url", "bucket", "reason", "detail")])
TOO_SMALL = "too_small"
OTHER_BUCKET = "other_bucket"
"""It is in another bucket of its aspect table: counted in the receipt, but no reject, and listed nowhere."""


def write_rows(path: Path, schema: pa.Schema, rows: list[tuple[Any, ...]]) -> None:
    """Rows as tuples in the schema's order → a parquet file; the same rows give the same bytes."""
    columns = zip(*rows, strict=True) if rows else [() for _ in schema]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    pq.write_table(pa.table(arrays, schema=schema), path)


@dataclass(frozen=True)
class Books:
    """One input shard over all of its buckets."""

    encoded: int
    """Samples in at least one bucket."""
    captions: dict[str, int]
    """Of these: captions `stored`, and how many of them took each of MENDED."""
    rejects: list[tuple[str, str, str, str, str]]
    """(key, url, bucket, reason, detail) by key. `bucket` is empty where the sample is in none; otherwise it names the
    one that refused it for another reason than its size."""
    refused: dict[str, dict[str, int]]
    """Bucket → reason → samples that it refused."""

    @property
    def rejected(self) -> dict[str, int]:
        """Reason → samples that are in no bucket."""
        return dict(sorted(Counter(row[3] for row in self.rejects if not row[2]).items()))


def read_books(parts: dict[str, Path]) -> Books:
    """Add up the tables of a shard's parts: bucket → folder."""
    captions: dict[str, tuple[int, ...]] = {}
    refused: dict[str, list[tuple[str, str, str, str, str]]] = {}
    reasons: dict[str, dict[str, int]] = {}
    for bucket in sorted(parts):
        samples = pq.read_table(parts[bucket] / SAMPLES_NAME, columns=["key", "captions", *MENDED])
        keys, *counts = (column.to_pylist() for column in samples.columns)
        captions.update(zip(keys, zip(*counts, strict=True), strict=True))
        table = pq.read_table(parts[bucket] / REFUSED_NAME)
        reasons[bucket] = Counter(table["reason"].to_pylist())
        for key, url, reason, detail in zip(*(column.to_pylist() for column in table.columns), strict=True):
            refused.setdefault(key, []).append((key, url, bucket, reason, detail))
    rejects = []
    for key in sorted(refused):
        telling = [row for row in refused[key] if row[3] != TOO_SMALL]
        if key in captions:
            rejects += telling
        else:
            key, url, _, reason, detail = (telling or refused[key])[0]
            rejects.append((key, url, "", reason, detail))
    totals = [sum(column) for column in zip(*captions.values(), strict=True)] or [0] * (1 + len(MENDED))
    return Books(len(captions), dict(zip(("stored", *MENDED), totals, strict=True)), rejects, reasons)
