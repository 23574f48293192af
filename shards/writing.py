"""Writing one input shard's samples for one bucket into a private attempt folder: MDS files and the part's tables."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from streaming import MDSWriter
from torch import Tensor

from shards import text
from shards.buckets import Bucket
from shards.encoding import EncodingRecord
from shards.tables import OTHER_BUCKET, REFUSED_NAME, REFUSED_SCHEMA, SAMPLES_NAME, SAMPLES_SCHEMA, write_rows

SHARD_BYTES = 1 << 27


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
    truncated: bool
    """Whether the caption was longer than the text encoder takes."""
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
        self.samples: list[tuple[object, ...]] = []
        self.refused: list[tuple[object, ...]] = []
        self.elsewhere = 0
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
        scores = (float(score) for score in sample.scores)
        self.samples.append((sample.key, *sample.size[:2], *scores, sample.truncated))

    def refuse(self, key: str, url: str, reason: str, detail: str) -> None:
        """Record a sample of the input shard that is not in this bucket."""
        self.refused.append((key, url, reason, detail))

    def pass_over(self) -> None:
        """Count a sample that is in another bucket of the aspect table."""
        self.elsewhere += 1

    def finish(self) -> tuple[int, dict[str, int]]:
        """Close the part's files; returns how many samples they hold, and refusals by reason."""
        self.writer.finish()
        write_rows(self.folder / SAMPLES_NAME, SAMPLES_SCHEMA, self.samples)
        write_rows(self.folder / REFUSED_NAME, REFUSED_SCHEMA, self.refused)
        reasons = Counter(str(row[2]) for row in self.refused) + Counter({OTHER_BUCKET: self.elsewhere})
        return len(self.samples), dict(sorted(reasons.items()))
