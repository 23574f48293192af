"""Writing one input shard's samples into a private attempt folder: one MDS part per bucket, and its sample table."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from streaming import MDSWriter
from torch import Tensor

from shards import text
from shards.buckets import Bucket
from shards.encoding import EncodingRecord

SHARD_BYTES = 1 << 27
TABLE_NAME = "samples.parquet"
TABLE_SCHEMA = pa.schema(
    [("key", pa.string()), ("width", pa.int32()), ("height", pa.int32())]
    + [(score, pa.float32()) for score in ("aesthetic", "similarity", "punsafe", "pwatermark")]
)


@dataclass(frozen=True)
class Sample:
    """One picture with its caption, encoded for one bucket; everything on the CPU."""

    key: str
    caption: str
    image_latents: Tensor
    """(planes, h, w): the posterior's mean and log-variance, unscaled, or its mean alone."""
    text_latents: Tensor
    """(tokens, width), padding included."""
    num_tokens: int
    """Real tokens: begin, words, end."""
    size: tuple[int, int, int, int]
    """Original width and height, crop top and left, in original pixels."""
    scores: np.ndarray
    """(4,) float32: aesthetic, similarity, punsafe, pwatermark; NaN where absent."""


class PartWriter:
    """Writes samples of one bucket to `folder`. Nothing there is valid until `finish` returns.

    It is no context manager on purpose: MDSWriter's own publishes a valid-looking index when its body raises.
    """

    def __init__(self, folder: Path, encoding: EncodingRecord, bucket: Bucket):
        self.folder = folder
        self.encoding = encoding
        self.rows: list[tuple[object, ...]] = []
        folder.mkdir(parents=True)
        self.writer = MDSWriter(
            out=str(folder), columns=encoding.columns(bucket), hashes=["xxh3_64"], size_limit=SHARD_BYTES
        )

    def write(self, sample: Sample) -> None:
        """Append one sample; order is kept."""
        stored = self.encoding.text
        self.writer.write(
            {
                "key": sample.key,
                "caption": sample.caption,
                "image_latents": sample.image_latents.half().numpy(),
                **text.pack(sample.text_latents, sample.num_tokens, stored.storage, stored.trim),
                "size": np.array(sample.size, np.int32),
                "scores": sample.scores.astype(np.float32),
            }
        )
        self.rows.append((sample.key, sample.size[0], sample.size[1], *(float(score) for score in sample.scores)))

    def finish(self) -> int:
        """Close the part's files; returns how many samples they hold."""
        self.writer.finish()
        columns = zip(*self.rows, strict=True) if self.rows else [() for _ in TABLE_SCHEMA]
        arrays = [pa.array(values, field.type) for values, field in zip(columns, TABLE_SCHEMA, strict=True)]
        pq.write_table(pa.table(arrays, schema=TABLE_SCHEMA), self.folder / TABLE_NAME)
        return len(self.rows)
