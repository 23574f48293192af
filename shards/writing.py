"""Writing one input shard's samples for one bucket into a private attempt folder: MDS files and the part's tables."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from shards import text
from shards.buckets import Bucket
from shards.encoding import EncodingRecord
from shards.mds_writer import PartMDSWriter
from shards.receipts import FileRecord
from shards.tables import REFUSED_NAME, REFUSED_SCHEMA, SAMPLES_NAME, SAMPLES_SCHEMA, write_rows


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
        self.refused: list[tuple[str, str, str, str]] = []
        folder.mkdir(parents=True)
        self.writer = PartMDSWriter(folder, encoding, bucket)

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

    @property
    def records(self) -> dict[str, FileRecord]:
        """Size and SHA-256 of the MDS files, taken as they were written."""
        return self.writer.records

    def finish(self) -> tuple[int, dict[str, int]]:
        """Close the part's files; returns how many samples they hold, and refusals by reason."""
        self.writer.finish()
        write_rows(self.folder / SAMPLES_NAME, SAMPLES_SCHEMA, self.samples)
        # several stages of a worker refuse samples, each at its own time: by key, the same in every run
        write_rows(self.folder / REFUSED_NAME, REFUSED_SCHEMA, sorted(self.refused))
        reasons = Counter(str(row[2]) for row in self.refused)
        return len(self.samples), dict(sorted(reasons.items()))
