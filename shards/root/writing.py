"""Writing one input shard's samples for one bucket into a private attempt folder: MDS files and the part's tables."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from shards.format import image, text
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.mds_writer import PartMDSWriter
from shards.format.receipts import FileRecord, MdsFile, mds_file
from shards.format.tables import (
    CAPTION_CHANGES,
    OTHER_BUCKET,
    REFUSED_NAME,
    REFUSED_SCHEMA,
    SAMPLES_NAME,
    SAMPLES_SCHEMA,
    TOO_SMALL,
    write_rows,
)
from shards.format.text import TextLatents

FIRST_COUNT = SAMPLES_SCHEMA.get_field_index("captions")
CAPTION_COUNTS = slice(FIRST_COUNT, FIRST_COUNT + 1 + len(CAPTION_CHANGES))
"""Of a row of samples.parquet: captions, and how many of these had each of CAPTION_CHANGES."""


@dataclass(frozen=True)
class Caption:
    """One caption, encoded; on the CPU."""

    text: str
    latents: dict[str, TextLatents]
    """Of each text tower."""
    changes: frozenset[str]
    """Which of `shards.format.tables.CAPTION_CHANGES` cleaning made."""


@dataclass(frozen=True)
class Sample:
    """One picture with its captions, encoded for one bucket; everything on the CPU."""

    key: str
    captions: list[Caption | None]
    """One for each of the encoding's caption fields, None where the sample has none; at least one is there."""
    image_latents: Tensor
    """(planes, h, w): the posterior's mean and log-variance, or its mean alone; neither shifted nor scaled."""
    size: tuple[int, int, int, int]
    """Original width and height, crop top and left, in original pixels."""
    scores: np.ndarray
    """(4,) float32: aesthetic, similarity, punsafe, pwatermark; NaN where absent."""
    features: dict[str, Tensor] = field(default_factory=dict)
    """Of each feature tower, (tokens, width)."""
    url: str = ""
    sha256: str = ""
    """Of the picture's file, as it is in the tar."""

    @property
    def present(self) -> list[Caption]:
        """The captions that there are."""
        return [caption for caption in self.captions if caption is not None]


@dataclass(frozen=True)
class WrittenPart:
    """What a part holds; samples by their keys."""

    stored: list[str]
    refused: dict[str, int]
    """Reason → count."""
    rejects: dict[str, list[str]]
    """Reason → keys, of those refused for another reason than their size or ratio."""
    captions: dict[str, int]
    """`stored`, and of these how many had each of CAPTION_CHANGES."""
    mds: tuple[MdsFile, ...]
    records: dict[str, FileRecord]
    """Size and SHA-256 of the MDS files, taken as they were written."""


class PartWriter:
    """Writes samples of one bucket to `folder`. Nothing there is valid until `finish` returns.

    It is no context manager on purpose: one that finished where its body raised would publish a valid-looking index.
    """

    def __init__(self, folder: Path, encoding: EncodingRecord, bucket: Bucket):
        self.folder = folder
        self.encoding = encoding
        self.samples: list[tuple[Any, ...]] = []
        self.refused: list[tuple[str, str, str, str]] = []
        self.elsewhere = 0
        self.writer = PartMDSWriter(folder, encoding, bucket)

    def write(self, *samples: Sample) -> None:
        """Append samples; order is kept."""
        for sample, *of_towers in zip(samples, *self._tower_columns(samples), strict=True):
            columns = {
                "key": sample.key,
                "caption": self._caption_text(sample.captions),
                "size": np.array(sample.size, np.int32),
                "scores": sample.scores.astype(np.float32),
            }
            for of_tower in of_towers:
                columns |= of_tower
            present, scores = sample.present, sample.scores.tolist()
            counts = [sum(name in caption.changes for caption in present) for name in CAPTION_CHANGES]
            row = (sample.key, *sample.size[:2], *scores, len(present), *counts, sample.url, sample.sha256)
            self.append(columns, row)

    def append(self, columns: dict[str, Any], row: tuple[Any, ...]) -> None:
        """Append one sample as it is stored: its columns, and its row of samples.parquet."""
        self.writer.write(columns)
        self.samples.append(row)

    def _caption_text(self, captions: list[Caption | None]) -> str:
        texts = [None if caption is None else caption.text for caption in captions]
        return json.dumps(texts, ensure_ascii=False) if self.encoding.several else str(texts[0])

    def _tower_columns(self, samples: Sequence[Sample]) -> Iterator[Iterator[dict[str, np.ndarray]]]:
        """Of each tower, its columns of each sample."""
        yield image.pack(self.encoding.image, [sample.image_latents for sample in samples])
        for name, tower in self.encoding.texts.items():
            captions = [[caption.latents[name] for caption in sample.present] for sample in samples]
            yield text.pack(name, tower, captions, self.encoding.several)
        for name, feature_tower in self.encoding.features.items():
            yield image.pack_features(name, feature_tower, [sample.features[name] for sample in samples])

    def refuse(self, key: str, url: str, reason: str, detail: str) -> None:
        """Record a sample of the input shard that is not in this bucket."""
        self.refused.append((key, url, reason, detail))

    def pass_over(self, count: int = 1) -> None:
        """Count samples that are in another bucket of the aspect table."""
        self.elsewhere += count

    def finish(self) -> WrittenPart:
        """Close the part's files; returns what they hold."""
        self.writer.finish()
        write_rows(self.folder / SAMPLES_NAME, SAMPLES_SCHEMA, self.samples)
        # several stages of a worker refuse samples, each at its own time: by key, the same in every run
        write_rows(self.folder / REFUSED_NAME, REFUSED_SCHEMA, sorted(self.refused))
        keys: dict[str, list[str]] = {}
        for key, _, reason, _ in sorted(self.refused):
            keys.setdefault(reason, []).append(key)
        counts = [sum(column) for column in zip(*(row[CAPTION_COUNTS] for row in self.samples), strict=True)]
        return WrittenPart(
            stored=[row[0] for row in self.samples],
            refused={reason: len(rows) for reason, rows in sorted(keys.items())}
            | ({OTHER_BUCKET: self.elsewhere} if self.elsewhere else {}),
            rejects={reason: rows for reason, rows in sorted(keys.items()) if reason != TOO_SMALL},
            captions=dict(zip(("stored", *CAPTION_CHANGES), counts or [0] * (1 + len(CAPTION_CHANGES)), strict=True)),
            mds=tuple(map(mds_file, self.writer.entries)),
            records=self.writer.records,
        )
