"""Config for stage 1, and the encoding record and worker recipe that are derived from it."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from cluster.fleet import FleetConfig
from precompute.describe import (
    FeatureTowerConfig,
    FolderOrName,
    ImageConfig,
    Root,
    TextConfig,
    TextTowerConfig,
    TowerName,
    describe_features,
    describe_image,
    describe_text,
)
from precompute.encode.recipe import Recipe, SourceRoot, WorkerConfig
from precompute.input.captions import check_caption_sources, check_score_sources, source_name
from precompute.input.table import CaptionSource, ScoreSource, TableConfig, describe_tables
from precompute.input.unit import InputConfig
from precompute.pixels.buckets import AspectConfig, Buckets
from precompute.pixels.decode import LimitsConfig, PixelsConfig
from shards.base.config import Config
from shards.base.device import PrecisionOption
from shards.base.errors import RequestError
from shards.derive.conversion import Conversion
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.projection import TowerGroup, groups_of, inherited_widths
from shards.format.scores import LAION_SCORES
from shards.format.towers import TextTower
from shards.root.publish import IndexConfig


class WorkersConfig(WorkerConfig, FleetConfig):
    """Resources and behaviour of workers. Ray runs as many workers as fit on the cluster."""


class PrecomputeConfig(Config):
    """Stage 1: captioned images → a latents root."""

    input: FolderOrName
    """Folder, file or URL of captioned images: webdataset tars (such as those that `make download` wrote), image files
    with text files or a table beside them, parquet files with a column of images, or an MDS dataset."""
    source: Root | None = None
    """Latents root to derive the new root from, instead of encoding `input`. Its image latents are reused, as are the
    text latents and features of towers that do not change; new text towers encode its captions. No images are
    decoded."""
    output: Root
    """The latents root: a local folder, or an object-store URL such as s3://bucket/latents."""
    shards: str = "all"
    """Units (tars, or numbered groups of images) to encode: `00042`, `00000-00099`, a comma-separated list of both, or
    `all`."""
    buckets: list[str] = Field(["256x256", "512x512"], min_length=1)
    """Buckets as WIDTHxHEIGHT in pixels. An image goes to every bucket that it covers without upscaling."""
    aspect: AspectConfig = AspectConfig()
    vae: FolderOrName
    """A diffusers autoencoder: local folder, hub name org/repo[@revision]/folder, or URL such as s3://bucket/vae."""
    texts: dict[TowerName, TextTowerConfig] = Field(min_length=1)
    """One or more text encoders, by name."""
    features: dict[TowerName, FeatureTowerConfig] = Field({})
    """Any number of vision encoders, by name."""
    posterior: Literal["moments", "mean"] | None = None
    """`moments`, the default, stores the mean and log-variance, so that training can draw a new latent in every epoch;
    `mean` stores only the mean, in half the space. Omit `posterior` for an autoencoder that has none."""
    captions: Annotated[list[CaptionSource], AfterValidator(check_caption_sources), Field(min_length=1)] | None = None
    """Sources of a sample's captions: `txt`, the text file beside the image; other names are fields of the JSON beside
    it, or columns of its row (`caption`, `captions[0]`). With several, all captions are stored, and training
    draws one of them each time it uses the sample. An entry can also be an object with a weight, or with a column of a
    table, as in `{table: captions.parquet, key: key, column: vlm_long, fallback: txt, weight: 3}`. By default, stage 1
    looks for the captions in the first samples, and stops with a list if several fields qualify."""
    scores: Annotated[list[ScoreSource], AfterValidator(check_score_sources), Field(min_length=1)] = Field(
        list(LAION_SCORES), validate_default=True
    )
    """Numbers to store with each sample, so that training can filter by them (`data.filter`): fields of the JSON beside
    an image, or columns of its row or of a table, as in `{table: scores.parquet, key: key, column: hps}`."""
    precision: PrecisionOption = "float16"
    """Autocast data type for all towers; part of the encoding id. With `float16`, samples that overflow are encoded
    again in float32; with `bfloat16`, which has float32's range, they are refused. `auto` uses the precision of the
    existing root. For a new root, it uses bfloat16 if the workers' device supports it, and float32 otherwise."""
    image: ImageConfig = ImageConfig()
    text: TextConfig = TextConfig()
    pixels: PixelsConfig = PixelsConfig()
    limits: LimitsConfig = LimitsConfig()
    tars: InputConfig = InputConfig()
    workers: WorkersConfig = WorkersConfig()
    index: IndexConfig = IndexConfig()

    @field_validator("buckets")
    @classmethod
    def _parse_buckets(cls, names: list[str]) -> list[str]:
        buckets = sorted({Bucket.parse(name) for name in names})
        if len(buckets) != len(names):
            raise ValueError("a bucket is listed twice")
        return [str(bucket) for bucket in buckets]

    @model_validator(mode="after")
    def _check_towers(self) -> "PrecomputeConfig":
        rounded = [name for name, tower in self.texts.items() if tower.weights == "float8"]
        if rounded and self.precision != "bfloat16":
            raise ValueError(
                f"texts.{rounded[0]}.weights: float8 needs bfloat16. Set precision to bfloat16, or weights to int8"
            )
        columns = {source.column for source in self.captions or () if source.column}
        if both := sorted(columns & {source.name for source in self.scores}):
            raise ValueError(f"scores: {both[0]} is also the column of a table of captions; rename one of them")
        return self

    @property
    def to_fill(self) -> Buckets:
        """All buckets, including those of `aspect`."""
        return Buckets(tuple(Bucket.parse(name) for name in self.buckets), self.aspect.tables)


def describe_encoding(config: PrecomputeConfig, tables: tuple[TableConfig, ...] | None = None) -> EncodingRecord:
    """Build the encoding record for a run from the configs and hashes of its models, without loading weights. Raises
    RequestError if a model is missing or unsuitable, or a bucket does not fit a tower.

    Args:
        tables: the tables of captions and scores, if they were described before.
    """
    pixels = config.pixels
    assert config.precision != "auto" and config.captions is not None, "call `resolved` first"
    tables = describe_tables(config.captions, config.scores) if tables is None else tables
    sources = config.captions
    weights = [source.weight // math.gcd(*(each.weight for each in sources)) for source in sources]
    record = EncodingRecord(
        image=describe_image(
            config.vae,
            config.posterior,
            crop=pixels.crop,
            resampling=pixels.resampling,
            decoder=pixels.decoder,
            resampler=pixels.resampler,
            color="srgb",
            storage=config.image.storage,
        ),
        texts={name: describe_text(name, tower, config.text) for name, tower in config.texts.items()},
        features={name: describe_features(name, tower, config.to_fill.all) for name, tower in config.features.items()},
        captions=tuple(map(source_name, sources)),
        caption_weights=tuple(weights) if len(set(weights)) > 1 else (),
        tables={column: table.identity for table in tables for column in table.columns},
        max_characters=config.limits.max_caption_characters,
        compute_dtype=config.precision,
        scores=tuple(source.name for source in config.scores),
        deduplicates_text=config.text.deduplicate,
    )
    for bucket in config.to_fill.all:
        try:
            record.columns(bucket)
        except ValueError as error:
            step = record.image.downsampling
            raise RequestError(f"{error}. Use multiples of {step} for bucket sides and aspect.step.") from None
    return record


def groups_to_project(
    config: PrecomputeConfig, texts: Mapping[str, TextTower], like: Mapping[str, TextTower] | None
) -> dict[TowerGroup, int]:
    """Return each group of towers to project → its number of dimensions.

    Args:
        texts: the towers' records.
        like: towers of the root `text.projection`, whose widths are the default.

    Raises:
        RequestError: the towers cannot be projected as requested.
    """
    inherited, joint = inherited_widths(texts, like, str(config.text.projection)) if like is not None else ({}, ())
    widths = {}
    for name, tower in texts.items():
        width = config.texts[name].width or config.text.width or inherited.get(name)
        if tower.states and width is not None:
            widths[name] = width
    return groups_of(texts, widths, tuple(map(tuple, config.text.joint)) or joint)


def make_recipe(
    config: PrecomputeConfig,
    encoding: EncodingRecord,
    conversion: Conversion | None = None,
    tables: tuple[TableConfig, ...] | None = None,
) -> Recipe:
    """Build the recipe that workers receive. `conversion` tells them how to convert the data in `config.source`.

    Args:
        tables: the tables of captions and scores, if they were described before.
    """
    towers: dict[str, TextTowerConfig | FeatureTowerConfig] = {
        **{f"texts.{name}": tower for name, tower in config.texts.items()},
        **{f"features.{name}": tower for name, tower in config.features.items()},
    }
    batch_sizes = {name: tower.batch_size for name, tower in towers.items() if tower.batch_size}
    return Recipe(
        encoding,
        config.to_fill,
        config.pixels,
        config.limits,
        config.tars,
        config.workers,
        batch_sizes,
        SourceRoot(config.source, conversion) if config.source is not None and conversion is not None else None,
        tables=describe_tables(config.captions or (), config.scores) if tables is None else tables,
    )
