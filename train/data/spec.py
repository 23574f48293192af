"""What a run reads: the config of its data, and what `streams.py` found at the places that it names."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, ValidationInfo, model_validator

from shards.base.config import OVERRIDDEN, Config
from shards.base.store import Place, Store
from shards.format import image, text
from shards.format.buckets import Bucket, BucketName
from shards.format.encoding import SIZE_TYPE, EncodingRecord
from shards.format.mds import MdsIndex
from shards.format.text import TextLatents
from shards.format.towers import FeatureTower, ImageTower, TextTower
from train.data.node import Look
from train.data.selection import FilterConfig, Selection


class StreamConfig(Config):
    """One bucket of one latents root."""

    root: Place
    """The latents root that stage 1 wrote: a folder, or an address such as s3://bucket/latents."""
    bucket: BucketName
    """WIDTHxHEIGHT in pixels."""
    weight: float = Field(1.0, gt=0, le=10_000)
    """Passes over the samples that pass the filter, per epoch."""
    filter: FilterConfig | None = None
    """Which samples; in place of data.filter."""
    cache: Path | None = None
    """Local folder for copies of its files; in place of data.cache."""


class DataConfig(Config):
    """What is read, and in which order."""

    short_for: ClassVar[dict[str, str]] = {"root": "streams", "bucket": "streams"}
    streams: list[StreamConfig] = Field(min_length=1)
    """At least one; those of one latent shape share their global batches."""
    root: Place | None = Field(None, exclude=True)
    """Short for the `root` of the one stream, so that it can be typed; the other fields stay the stream's."""
    bucket: str | None = Field(None, exclude=True)
    """Short for its `bucket`."""
    num_workers: int = Field(8, ge=0)
    """Loader processes per rank, where `prefetch_gb` has room for as many; the order of samples does not depend on
    it."""
    prefetch_gb: float = Field(8.0, gt=0)
    """GB of host memory for the batches of a rank that are made ahead: ready ones, what processes make them of, and the
    one in use. Where that is less than four batches, there are four."""
    num_canonical_nodes: int = Field(64, ge=1)
    """Slices into which an epoch's order is cut, on any number of nodes; divides the global batch."""
    shuffle: bool = True
    """Files, and samples in blocks; false: in the order of the index."""
    shuffle_block: int = Field(32768, ge=1)
    """Samples of a slice that are shuffled together; a global batch mixes a block of every slice."""
    index: Literal["pinned", "newest"] = "pinned"
    """`pinned`: a run goes on with the parts and exclusions that it began with, whatever was added to its roots or
    recalled since. `newest`: it goes on from here with what the roots hold now."""
    towers: list[str] | None = None
    """Which of the roots' towers there are for the run, such as [texts.clip, features.dinov2]; null: all. It reads
    those that its network is told of, and the one that a layer is aligned with."""
    filter: FilterConfig | None = None
    """Which samples of every stream to train on, by their stored scores and sizes."""
    cache: Path | None = None
    """Local folder for copies of remote files, which are then read from there; a local root is copied too."""
    cache_limit: int | None = Field(None, ge=1)
    """Bytes of all copies in one cache folder; null: no limit."""
    timeout: float = Field(300.0, gt=0)
    """Seconds to wait for a batch before the run stops with an error."""
    first_timeout: float = Field(1800.0, gt=0)
    """The same for each loader process's first batch: until then a machine fetches and hashes a good part of a block of
    every slice. So long other processes wait for the slowest, in the first `num_workers` steps."""

    @model_validator(mode="before")
    @classmethod
    def _one_stream(cls, values: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, dict):
            return values
        short = {name: values[name] for name in cls.short_for if values.get(name) is not None}
        streams = values.get("streams") or [{}] if short else None
        if not isinstance(streams, list) or not all(isinstance(stream, dict) for stream in streams):
            return values
        names = " and ".join(f"data.{name}" for name in short)
        if "data.streams" in (info.context or {}).get(OVERRIDDEN, ()):
            raise ValueError(f"{names} and data.streams are two ways to say what is read; give one of them")
        if len(streams) > 1:
            raise ValueError(
                f"{names} would stand for one stream, but the file's data.streams lists {len(streams)}; change them "
                f"there, or give data.streams whole"
            )
        others = {name: value for name, value in values.items() if name not in short}
        return {**others, "streams": [{**streams[0], **short}]}

    def cache_of(self, stream: StreamConfig) -> Path | None:
        """Where a stream's files are copied to; None: they are read in place."""
        return stream.cache or self.cache


@dataclass(frozen=True)
class DataSpec:
    """What the stored numbers mean, and what an epoch of them is."""

    image: ImageTower
    texts: dict[str, TextTower]
    features: dict[str, FeatureTower]
    """Those towers that are read."""
    uncond: dict[str, TextLatents]
    """The empty caption's, of each text tower."""
    streams: tuple["OpenStream", ...]
    steps_per_epoch: int
    num_captions: int = 1
    """Most that a sample has."""
    look: Look | None = None
    """At the local files' sizes, by one process of each machine."""

    def of_towers(self, texts: list[str], features: list[str]) -> "DataSpec":
        """With these towers alone."""
        return replace(
            self,
            texts={name: tower for name, tower in self.texts.items() if name in texts},
            features={name: tower for name, tower in self.features.items() if name in features},
        )

    def sample_bytes(self, bucket: str) -> int:
        """Of a sample in a batch, all its captions among them; trimmed ones are padded there."""
        size = Bucket.parse(bucket)
        types = list(image.columns(self.image, size).values())
        for name, tower in self.texts.items():
            whole = text.columns(name, tower.model_copy(update={"trim": False}))
            types += list(whole.values()) * self.num_captions
        for name, feature_tower in self.features.items():
            types += image.feature_columns(name, feature_tower, size).values()
        return sum(array_bytes(kind) for kind in [*types, SIZE_TYPE])

    @property
    def lengths(self) -> dict[str, int | None]:
        """The columns of a batch: those of tokens → how many of an untrimmed caption, others → None."""
        return column_lengths(self.image, self.texts, self.features)


def array_bytes(kind: str) -> int:
    """Of a column of this MDS type, which says its shape: `ndarray:float16:77,1024`."""
    _, dtype, shape = kind.split(":")
    return np.dtype(dtype).itemsize * math.prod(map(int, shape.split(",")))


def column_lengths(
    image: ImageTower, texts: dict[str, TextTower], features: dict[str, FeatureTower]
) -> dict[str, int | None]:
    """As `DataSpec.lengths`, of these towers."""
    lengths: dict[str, int | None] = {"image_latents": None, "size": None}
    lengths |= {"image_scales": None} if image.storage == "int8" else {}
    for name, tower in texts.items():
        if tower.states:
            lengths |= {f"text_latents.{name}": tower.length, f"num_tokens.{name}": None}
            lengths |= {f"text_scales.{name}": tower.length} if tower.storage == "float8" else {}
        lengths |= {f"pooled.{name}": None} if tower.pooled else {}
    for name, feature_tower in features.items():
        lengths[f"features.{name}"] = None
        lengths |= {f"feature_scales.{name}": None} if feature_tower.storage == "float8" else {}
    return lengths


@dataclass(frozen=True)
class OpenStream:
    """A stream whose files were found, and how many of its samples make an epoch."""

    config: StreamConfig
    store: Store
    latent_hw: tuple[int, int]
    files: MdsIndex
    selection: Selection | None
    """None: no filter, all samples."""
    num_samples: int
    """That pass the filter."""
    chosen: int
    index_sha256: str
    """The index's id."""
    encoding_id: str
    exclusions: tuple[str, ...] = ()
    """Ids of the lists that were applied."""
    recalled: int = 0
    """Samples of parts that were recalled since the index was published."""


def only_read(record: EncodingRecord, towers: list[str] | None) -> EncodingRecord:
    """The record with those towers alone that `data.towers` names."""
    if towers is None:
        return record
    texts = {name: tower for name, tower in record.texts.items() if f"texts.{name}" in towers}
    features = {name: tower for name, tower in record.features.items() if f"features.{name}" in towers}
    return record.model_copy(update={"texts": texts, "features": features})


def encoding_differences(a: EncodingRecord, b: EncodingRecord) -> list[str]:
    """Fields that differ and change what the numbers mean, as `field: here ≠ there`."""
    # Crop, resampling, decoder, dtype and the captions' sources may differ: they change which pictures and which
    # captions there are, not what the numbers mean.
    image = ("image.crop", "image.resampl", "image.decoder", "image.color")
    irrelevant = (*image, "captions", "max_characters", "compute_dtype")
    return [difference for difference in a.differences(b) if not difference.startswith(irrelevant)]
