"""Config for stage 1, and the encoding record and worker recipe that are derived from it."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from cluster.fleet import FleetConfig
from precompute.describe import (
    FeatureTowerConfig,
    FolderOrName,
    ImageConfig,
    TextConfig,
    TextTowerConfig,
    TowerName,
    describe_features,
    describe_image,
    describe_text,
)
from precompute.encode.recipe import Recipe, SourceRoot, WorkerConfig
from precompute.input.captions import check_caption_fields
from precompute.input.tars import TarsConfig
from precompute.pixels.buckets import AspectConfig, Buckets
from precompute.pixels.decode import LimitsConfig, PixelsConfig
from shards.base.config import Config
from shards.base.device import PrecisionOption
from shards.base.errors import RequestError
from shards.base.store import Place
from shards.derive.conversion import Conversion
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.scores import score_names
from shards.root.publish import IndexConfig


def _absolute(place: Path | str) -> Path | str:
    return place.absolute() if isinstance(place, Path) else place


Root = Annotated[Place, AfterValidator(_absolute)]


class WorkersConfig(WorkerConfig, FleetConfig):
    """Resources and behaviour of workers. Ray runs as many workers as fit on the cluster."""


class PrecomputeConfig(Config):
    """Stage 1: webdataset tars of captioned images → a latents root."""

    input: FolderOrName
    """Folder or URL of the tars, such as those that `make download` wrote."""
    source: Root | None = None
    """Latents root to derive the new root from, instead of encoding `input`. Its image latents are reused, as are the
    text latents and features of towers that do not change; new text towers encode its captions. No images are
    decoded."""
    output: Root
    """The latents root: a local folder, or an object-store URL such as s3://bucket/latents."""
    shards: str = "all"
    """Tars to encode: `00042`, `00000-00099`, a comma-separated list of both, or `all`."""
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
    captions: Annotated[list[str], AfterValidator(check_caption_fields)] = Field(["txt"], min_length=1)
    """Caption fields of a sample: `txt` for its text member, or `json:FIELD` for a field of its JSON. With several
    fields, all captions are stored, and training draws one of them each time it uses the sample."""
    precision: PrecisionOption = "float16"
    """Autocast data type for all towers; part of the encoding id. Samples that overflow are encoded again in float32.
    `auto` uses the precision of the existing root. For a new root, it uses bfloat16 if the workers' device supports it,
    and float32 otherwise."""
    image: ImageConfig = ImageConfig()
    text: TextConfig = TextConfig()
    pixels: PixelsConfig = PixelsConfig()
    limits: LimitsConfig = LimitsConfig()
    tars: TarsConfig = TarsConfig()
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
        rounded = [name for name, tower in self.texts.items() if tower.weights == "int8"]
        if rounded and self.precision == "float16":
            raise ValueError(
                f"texts.{rounded[0]}.weights: matrix products with int8 weights overflow float16; set precision: "
                f"bfloat16"
            )
        return self

    @property
    def to_fill(self) -> Buckets:
        """All buckets, including those of `aspect`."""
        return Buckets(tuple(Bucket.parse(name) for name in self.buckets), self.aspect.tables)


def describe_encoding(config: PrecomputeConfig) -> EncodingRecord:
    """Build the encoding record for a run from the configs and hashes of its models, without loading weights. Raises
    RequestError if a model is missing or unsuitable, or a bucket does not fit a tower."""
    pixels = config.pixels
    assert config.precision != "auto", "resolve the precision first"
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
        captions=tuple(config.captions),
        max_characters=config.limits.max_caption_characters,
        compute_dtype=config.precision,
        scores=score_names(),
    )
    for bucket in config.to_fill.all:
        try:
            record.columns(bucket)
        except ValueError as error:
            step = record.image.downsampling
            raise RequestError(f"{error}. Use multiples of {step} for bucket sides and aspect.step.") from None
    return record


def make_recipe(config: PrecomputeConfig, encoding: EncodingRecord, conversion: Conversion | None = None) -> Recipe:
    """Build the recipe that workers receive. `conversion` tells them how to convert the data in `config.source`."""
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
    )
