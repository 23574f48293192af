"""Write a part (the samples of one tar for one bucket) to a private attempt folder, as MDS files and sample tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shards.format import image, text
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.mds_writer import PartMDSWriter
from shards.format.receipts import FileRecord, MdsFile
from shards.format.tables import (
    CAPTION_CHANGES,
    OTHER_BUCKET,
    REFUSED_NAME,
    REFUSED_SCHEMA,
    SAMPLES_NAME,
    TOO_SMALL,
    samples_schema,
)
from shards.format.text import TextLatents

if TYPE_CHECKING:
    from torch import Tensor

MAX_LICENSES = 50
"""Number of licences that are counted separately in a part."""
OTHER_LICENSES = "other licences"


@dataclass(frozen=True)
class Caption:
    """One encoded caption, in CPU memory."""

    text: str
    latents: dict[str, TextLatents]
    """Text tower → latents."""
    changes: frozenset[str]
    """Changes that cleaning made to the text: a subset of `shards.format.tables.CAPTION_CHANGES`."""


@dataclass(frozen=True)
class Sample:
    """One image with its captions, encoded for one bucket, in CPU memory."""

    key: str
    captions: list[Caption | None]
    """One entry per caption field of the encoding, which is None if the sample has no such caption. At least one entry
    is not None."""
    image_latents: Tensor
    """(planes, h, w): the posterior's mean and log-variance, or only its mean, before the VAE's shift and scale."""
    size: tuple[int, int, int, int]
    """Width and height of the original image, then top and left of the crop, in pixels of the original image."""
    scores: np.ndarray
    """(scores,) float32: the scores that the encoding names, or NaN for scores that the sample does not have."""
    features: dict[str, Tensor] = field(default_factory=dict)
    """Feature tower → (tokens, width)."""
    url: str = ""
    sha256: str = ""
    """SHA-256 of the image file in the tar."""
    license: str = ""
    """Licence of the image, as the input states it."""

    @property
    def present(self) -> list[Caption]:
        """The sample's captions, without the missing ones."""
        return [caption for caption in self.captions if caption is not None]


@dataclass(frozen=True)
class WrittenPart:
    """The contents of a finished part."""

    stored: list[str]
    """Keys of the stored samples."""
    refused: dict[str, int]
    """Reason → number of refused samples."""
    rejects: dict[str, list[str]]
    """Reason → keys of the samples that were refused for a reason other than their size or aspect ratio."""
    captions: dict[str, int]
    """Number of `stored` captions, and for each entry of CAPTION_CHANGES, the number of captions with that change."""
    licenses: dict[str, int]
    """Licence → number of stored samples."""
    mds: tuple[MdsFile, ...]
    records: dict[str, FileRecord]
    """Size and SHA-256 of the MDS files, computed while they were written."""


def caption_text(texts: Sequence[str | None], encoding: EncodingRecord) -> str:
    """Return the stored form of a sample's captions, given the caption of each source or None."""
    return json.dumps(texts, ensure_ascii=False) if encoding.several else str(texts[0])


def license_counts(licenses: Iterable[str]) -> dict[str, int]:
    """Count samples by licence, without those that have none. Rare licences are counted together."""
    found = Counter(filter(None, licenses)).most_common()
    counts = dict(found[:MAX_LICENSES])
    if rest := sum(count for _, count in found[MAX_LICENSES:]):
        counts[OTHER_LICENSES] = rest
    return counts


class PartWriter:
    """Writer of one bucket's samples to `folder`, which is incomplete until `finish` returns.

    This is deliberately not a context manager: finishing the part after an exception would leave a valid-looking index.
    """

    def __init__(self, folder: Path, encoding: EncodingRecord, bucket: Bucket):
        self.folder = folder
        self.encoding = encoding
        self.samples: list[dict[str, Any]] = []
        """Rows of samples.parquet."""
        self.refused: list[tuple[str, str, str, str]] = []
        self.elsewhere = 0
        self.writer = PartMDSWriter(folder, encoding, bucket)

    def write(self, *samples: Sample) -> None:
        """Append samples in the given order."""
        for sample, *of_towers in zip(samples, *self._tower_columns(samples), strict=True):
            columns = {
                "key": sample.key,
                "caption": caption_text([c and c.text for c in sample.captions], self.encoding),
                "size": np.array(sample.size, np.int32),
                "scores": sample.scores.astype(np.float32),
            }
            columns |= self.encoding.weights_of(sample.captions)
            for of_tower in of_towers:
                columns |= of_tower
            present = sample.present
            row: dict[str, Any] = {"key": sample.key, "width": sample.size[0], "height": sample.size[1]}
            row |= zip(self.encoding.scores, sample.scores.tolist(), strict=True)
            row |= {"captions": len(present)}
            row |= {name: sum(name in caption.changes for caption in present) for name in CAPTION_CHANGES}
            row |= {"url": sample.url, "sha256": sample.sha256, "license": sample.license}
            self.append(columns, row)

    def append(self, columns: dict[str, Any], row: dict[str, Any]) -> None:
        """Append one sample in its stored form: its MDS columns and its row in samples.parquet."""
        self.writer.write(columns)
        self.samples.append(row)

    def _tower_columns(self, samples: Sequence[Sample]) -> Iterator[Iterator[dict[str, np.ndarray]]]:
        """Yield one iterator per tower, which in turn yields the tower's columns for each sample."""
        yield image.pack(self.encoding.image, [sample.image_latents for sample in samples])
        for name, tower in self.encoding.texts.items():
            captions = [[caption.latents[name] for caption in sample.present] for sample in samples]
            yield text.pack(name, tower, captions, self.encoding.several)
        for name, feature_tower in self.encoding.features.items():
            yield image.pack_features(name, feature_tower, [sample.features[name] for sample in samples])

    def refuse(self, key: str, url: str, reason: str, detail: str) -> None:
        """Record a sample that is not stored in this bucket, with a one-word reason and details."""
        self.refused.append((key, url, reason, detail))

    def skip(self, count: int = 1) -> None:
        """Count samples that belong to a different bucket in the aspect table."""
        self.elsewhere += count

    def finish(self) -> WrittenPart:
        """Close the part's files and return their contents."""
        self.writer.finish()
        stored = pa.Table.from_pylist(self.samples, samples_schema(self.encoding.scores))
        pq.write_table(stored, self.folder / SAMPLES_NAME)
        # several stages of a worker refuse samples concurrently; sorting by key makes the file reproducible
        refused = [dict(zip(REFUSED_SCHEMA.names, row, strict=True)) for row in sorted(self.refused)]
        pq.write_table(pa.Table.from_pylist(refused, REFUSED_SCHEMA), self.folder / REFUSED_NAME)
        keys: dict[str, list[str]] = {}
        for row in refused:
            keys.setdefault(row["reason"], []).append(row["key"])
        return WrittenPart(
            stored=[row["key"] for row in self.samples],
            refused={reason: len(rows) for reason, rows in sorted(keys.items())}
            | ({OTHER_BUCKET: self.elsewhere} if self.elsewhere else {}),
            rejects={reason: rows for reason, rows in sorted(keys.items()) if reason != TOO_SMALL},
            captions={"stored": sum(row["captions"] for row in self.samples)}
            | {name: sum(row[name] for row in self.samples) for name in CAPTION_CHANGES},
            licenses=license_counts(row["license"] for row in self.samples),
            mds=tuple(self.writer.files),
            records=self.writer.records,
        )
