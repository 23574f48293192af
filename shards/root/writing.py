"""Writing one input shard's samples for one bucket into a private attempt folder: MDS files and the part's tables."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from shards.format import text
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.mds_writer import PartMDSWriter
from shards.format.receipts import FileRecord
from shards.format.tables import (
    MENDED,
    OTHER_BUCKET,
    REFUSED_NAME,
    REFUSED_SCHEMA,
    SAMPLES_NAME,
    SAMPLES_SCHEMA,
    write_rows,
)


@dataclass(frozen=True)
class Caption:
    """One caption, encoded; on the CPU."""

    text: str
    latents: Tensor
    """(tokens, width), padding included."""
    num_tokens: int
    """Real tokens: begin, words, end."""
    mended: frozenset[str]
    """Which of `shards.format.tables.MENDED` it took."""


@dataclass(frozen=True)
class Sample:
    """One picture with its captions, encoded for one bucket; everything on the CPU."""

    key: str
    captions: list[Caption | None]
    """One for each of the encoding's caption fields, None where the sample has none; at least one is there."""
    image_latents: Tensor
    """(planes, h, w): the posterior's mean and log-variance, unscaled, or its mean alone."""
    size: tuple[int, int, int, int]
    """Original width and height, crop top and left, in original pixels."""
    scores: np.ndarray
    """(4,) float32: aesthetic, similarity, punsafe, pwatermark; NaN where absent."""


class PartWriter:
    """Writes samples of one bucket to `folder`. Nothing there is valid until `finish` returns.

    It is no context manager on purpose: one that finished where its body raised would publish a valid-looking index.
    """

    def __init__(self, folder: Path, encoding: EncodingRecord, bucket: Bucket):
        self.folder = folder
        self.encoding = encoding
        self.samples: list[tuple[object, ...]] = []
        self.refused: list[tuple[str, str, str, str]] = []
        self.elsewhere = 0
        self.writer = PartMDSWriter(folder, encoding, bucket)

    def write(self, sample: Sample) -> None:
        """Append one sample; order is kept."""
        present = [caption for caption in sample.captions if caption is not None]
        self.writer.write(
            {
                "key": sample.key,
                "image_latents": sample.image_latents.half().numpy(),
                **self._caption_columns(sample.captions, present),
                "size": np.array(sample.size, np.int32),
                "scores": sample.scores.astype(np.float32),
            }
        )
        counts = [sum(name in caption.mended for caption in present) for name in MENDED]
        self.samples.append((sample.key, *sample.size[:2], *sample.scores.tolist(), len(present), *counts))

    def _caption_columns(self, captions: list[Caption | None], present: list[Caption]) -> dict[str, Any]:
        stored = self.encoding.text
        if not stored.several:
            (caption,) = present
            packed = text.pack(caption.latents, caption.num_tokens, stored.storage, stored.trim)
            return {"caption": caption.text, **packed}
        texts = [None if caption is None else caption.text for caption in captions]
        latents = [(caption.latents, caption.num_tokens) for caption in present]
        return {
            "caption": json.dumps(texts, ensure_ascii=False),
            **text.pack_several(latents, stored.storage, stored.trim),
        }

    def refuse(self, key: str, url: str, reason: str, detail: str) -> None:
        """Record a sample of the input shard that is not in this bucket."""
        self.refused.append((key, url, reason, detail))

    def pass_over(self) -> None:
        """Count a sample that is in another bucket of the aspect table."""
        self.elsewhere += 1

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
        reasons = Counter(str(row[2]) for row in self.refused) + Counter({OTHER_BUCKET: self.elsewhere})
        return len(self.samples), dict(sorted(reasons.items()))
