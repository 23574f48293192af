"""The config of a run's data, and the description of its opened streams, which `streams.py` builds."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, model_validator

from shards.base.config import OVERRIDDEN, Config
from shards.base.store import LocalPath, Place, Store
from shards.format import image, text
from shards.format.buckets import Bucket, BucketName
from shards.format.encoding import SIZE_TYPE, EncodingRecord
from shards.format.mds import Column, MdsIndex
from shards.format.text import TextLatents
from shards.format.towers import FeatureTower, ImageTower, TextTower
from train.data.node import SizeCheck
from train.data.selection import FilterConfig, Selection


class StreamConfig(Config):
    """One bucket of one latents root."""

    root: Place
    """Latents root written by stage 1: a folder, or a URL such as s3://bucket/latents."""
    bucket: BucketName
    """Size in pixels, WIDTHxHEIGHT."""
    weight: float = Field(1.0, gt=0, le=10_000)
    """Number of passes per epoch over the samples that pass the filter."""
    filter: FilterConfig | None = None
    """Filter for this stream, instead of data.filter."""
    cache: LocalPath | None = None
    """Cache folder for this stream, instead of data.cache."""


class DataConfig(Config):
    """Training data and the order in which it is read."""

    short_for: ClassVar[dict[str, str]] = {"root": "streams", "bucket": "streams"}
    streams: list[StreamConfig] = Field(min_length=1)
    """One or more buckets of latents roots. Streams with the same latent shape share global batches."""
    root: Place | None = Field(None, exclude=True)
    """Shorthand for the `root` of the only stream, for the command line. The stream's other fields are kept."""
    bucket: str | None = Field(None, exclude=True)
    """Shorthand for the `bucket` of the only stream."""
    num_workers: int = Field(8, ge=0)
    """Number of loader workers per rank; fewer are started if `prefetch_gb` is too small for all of them. The number
    does not affect the order of samples."""
    prefetch_gb: float = Field(8.0, gt=0)
    """Host memory in GB for each rank's prefetched batches, including batches that are being collated and the batch in
    use. Four batches are always allowed, even if they exceed this limit."""
    num_canonical_nodes: int = Field(64, ge=1)
    """Number of slices into which an epoch's order is divided, regardless of the number of machines. It must divide the
    global batch size."""
    shuffle: bool = True
    """Shuffle files, and samples within blocks; false: read in the order of the index."""
    shuffle_block: int = Field(32768, ge=1)
    """Number of samples within a slice that are shuffled together. A global batch mixes one such block from each
    slice."""
    index: Literal["pinned", "newest"] = "pinned"
    """`pinned`: a resumed run keeps the parts and exclusions that it started with, even if its roots have changed
    since. `newest`: a resumed run switches to the current parts and exclusions of its roots."""
    towers: list[str] | None = None
    """Towers of the roots that the run may use, such as [texts.clip, features.dinov2]; null: all towers. The run reads
    only those that are inputs of the network or are used to align it."""
    filter: FilterConfig | None = None
    """Bounds on the stored scores and sizes of the samples to train on, in every stream."""
    cache: LocalPath | None = None
    """Local folder in which remote files are cached. Files from local roots are cached there as well."""
    cache_limit: int | None = Field(None, ge=1)
    """Maximum size of a cache folder in bytes; null: no limit."""
    timeout: float = Field(300.0, gt=0)
    """Time in seconds to wait for a batch before the run stops with an error. It also applies at the start of an epoch,
    where about as many files are new as at launch. With several processes, it is limited to 0.8 ×
    `collective_timeout`."""
    first_timeout: float = Field(1800.0, gt=0)
    """Time in seconds to wait for each loader worker's first batch, which can take long because a machine first has to
    download and hash much of a block from every slice. During the first `num_workers` steps, this is also the time
    that ranks wait for the slowest rank."""

    @model_validator(mode="before")
    @classmethod
    def _one_stream(cls, values: Any, info: ValidationInfo) -> Any:
        """Apply the shorthands `root` and `bucket` to the only stream."""
        if not isinstance(values, dict):
            return values
        short = {name: values[name] for name in cls.short_for if values.get(name) is not None}
        streams = values.get("streams") or [{}] if short else None
        if not isinstance(streams, list) or not all(isinstance(stream, dict) for stream in streams):
            return values
        names = " and ".join(f"data.{name}" for name in short)
        if "data.streams" in (info.context or {}).get(OVERRIDDEN, ()):
            raise ValueError(
                f"data.streams cannot be combined with {names}, because both set the data to read; remove one of them"
            )
        if len(streams) > 1:
            raise ValueError(
                f"{names} can change only a single stream, but data.streams in the file lists {len(streams)} streams; "
                f"change the streams in the file, or set all of data.streams"
            )
        others = {name: value for name, value in values.items() if name not in short}
        return {**others, "streams": [{**streams[0], **short}]}

    def cache_for(self, stream: StreamConfig) -> Path | None:
        """Return the cache folder for a stream's files, or None if they are read in place."""
        return stream.cache or self.cache


@dataclass(frozen=True)
class FoundStream:
    """The resolved state of a stream: everything about it that can change over time."""

    encoding: EncodingRecord
    index: str
    """ID of the index to which the run is pinned."""
    exclusions: tuple[str, ...]
    """IDs of the exclusion lists to apply."""
    recalled: frozenset[str]
    """Names (see `part_name`) of the bucket's parts that have been recalled so far."""


@dataclass(frozen=True)
class DataSpec:
    """The opened data of a run: its encoding, its streams and the length of an epoch."""

    image: ImageTower
    texts: dict[str, TextTower]
    """Text towers whose latents are read."""
    features: dict[str, FeatureTower]
    """Feature towers whose features are read."""
    uncond: dict[str, TextLatents]
    """Latents of the empty caption, by text tower."""
    streams: tuple["OpenStream", ...]
    steps_per_epoch: int
    num_captions: int = 1
    """Maximum number of captions per sample."""
    size_check: SizeCheck | None = None
    """Background check of the local files' sizes; None except in one process per machine."""

    def keep_towers(self, texts: list[str], features: list[str]) -> "DataSpec":
        """Return a copy that reads only these towers."""
        return replace(
            self,
            texts={name: tower for name, tower in self.texts.items() if name in texts},
            features={name: tower for name, tower in self.features.items() if name in features},
        )

    def sample_bytes(self, bucket: str) -> int:
        """Return the number of bytes that a sample takes up in a batch, with all its captions untrimmed."""
        size = Bucket.parse(bucket)
        types = list(image.columns(self.image, size).values())
        for name, tower in self.texts.items():
            whole = text.columns(name, tower.model_copy(update={"trim": False}))
            types += list(whole.values()) * self.num_captions
        for name, feature_tower in self.features.items():
            types += image.feature_columns(name, feature_tower, size).values()
        return sum(Column.of("", kind).size or 0 for kind in [*types, SIZE_TYPE])


def column_lengths(towers: DataSpec | EncodingRecord) -> dict[str, int | None]:
    """Return a dict from each column that these towers fill in a batch to its number of tokens per untrimmed caption,
    or to None if the column has no token axis."""
    lengths: dict[str, int | None] = {"image_latents": None, "size": None}
    lengths |= {"image_scales": None} if towers.image.storage == "int8" else {}
    for name, tower in towers.texts.items():
        if tower.states:
            lengths |= {f"text_latents.{name}": tower.length, f"num_tokens.{name}": None}
            lengths |= {f"text_scales.{name}": tower.length} if tower.storage == "float8" else {}
        lengths |= {f"pooled.{name}": None} if tower.pooled else {}
    for name, feature_tower in towers.features.items():
        lengths[f"features.{name}"] = None
        lengths |= {f"feature_scales.{name}": None} if feature_tower.storage == "float8" else {}
    return lengths


@dataclass(frozen=True)
class OpenStream:
    """A stream whose index has been read, with the number of its samples per epoch."""

    config: StreamConfig
    found: FoundStream
    store: Store
    latent_hw: tuple[int, int]
    files: MdsIndex
    selection: Selection | None
    """Samples to train on; None if all samples are used."""
    num_samples: int
    """Number of samples that pass the filter."""
    chosen: int
    """Number of samples per epoch, after applying the weight."""
    recalled: int
    """Number of samples in parts that were recalled after the index was published."""


def keep_towers(record: EncodingRecord, towers: list[str] | None) -> EncodingRecord:
    """Return the record with only those text and feature towers that `towers` names; None keeps all."""
    if towers is None:
        return record
    texts = {name: tower for name, tower in record.texts.items() if f"texts.{name}" in towers}
    features = {name: tower for name, tower in record.features.items() if f"features.{name}" in towers}
    return record.model_copy(update={"texts": texts, "features": features})


def encoding_differences(a: EncodingRecord, b: EncodingRecord) -> list[str]:
    """List the differences that make two roots' latents incompatible, as `field: a ≠ b`."""
    # Crop, resampling, decoder, dtype, caption sources and scores may differ: they change the images and captions, but
    # not the meaning of their latents. Text de-duplication does not matter either.
    image = ("image.crop", "image.resampl", "image.decoder", "image.color")
    captions = ("captions", "caption_weights", "max_characters")
    irrelevant = (*image, *captions, "tables", "scores", "compute_dtype", "deduplicates_text")
    return [difference for difference in a.differences(b) if not difference.startswith(irrelevant)]
