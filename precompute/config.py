"""The config of stage 1, put together from its rooms' own, and what follows from it: encoding record and recipe."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from precompute.cluster.fleet import FleetConfig
from precompute.describe import (
    FeatureTowerConfig,
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


class WorkersConfig(WorkerConfig, FleetConfig):
    """What one worker takes, and how it goes about its work. Ray runs as many as the cluster holds."""


class PrecomputeConfig(Config):
    """Stage 1: tars of captioned pictures → a latents root."""

    input: str
    """Folder or address of the tars that `make download` wrote."""
    source: Place | None = None
    """A latents root that is encoded again in place of `input`: its image latents and what else it has are taken over,
    and text towers that it lacks encode its captions. No picture is decoded."""
    output: Place
    """The latents root: a folder, or an address on an object store, such as s3://bucket/latents."""
    shards: str = "all"
    """Which tars: `00042`, `00000-00099`, commas of both, or `all`."""
    buckets: list[str] = Field(["256x256", "512x512"], min_length=1)
    """WIDTHxHEIGHT in pixels; a picture goes to each that it covers without being enlarged."""
    aspect: AspectConfig = AspectConfig()
    vae: str
    """Folder, org/repo[@revision]/folder on the hub, or address such as s3://bucket/vae, of a diffusers autoencoder."""
    texts: dict[TowerName, TextTowerConfig] = Field(min_length=1)
    """Text towers by name, any number."""
    features: dict[TowerName, FeatureTowerConfig] = Field(default_factory=dict)
    """Feature towers by name, any number."""
    posterior: Literal["moments", "mean"] | None = None
    """`moments`, the default, keeps mean and log-variance, so that training samples afresh each epoch; `mean` is half
    the size. An autoencoder without a posterior takes neither."""
    captions: list[str] = Field(["txt"], min_length=1)
    """Where a sample's captions are: `txt`, its member of that name, or `json:FIELD` of its JSON. Of several, each is
    stored, and the trainer draws one afresh each time."""
    precision: PrecisionOption = "float16"
    """Autocast type of all towers; part of the encoding id. A sample that overflows is encoded again in float32. `auto`
    is that of the root; for a new root, it is bfloat16 where a worker's device supports it, and float32 elsewhere."""
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
            raise ValueError("a bucket is named twice")
        return [str(bucket) for bucket in buckets]

    @field_validator("captions")
    @classmethod
    def _parse_captions(cls, fields: list[str]) -> list[str]:
        check_caption_fields(fields)
        return fields

    @model_validator(mode="after")
    def _check_towers(self) -> "PrecomputeConfig":
        rounded = [name for name, tower in self.texts.items() if tower.weights == "int8"]
        if rounded and self.precision == "float16":
            raise ValueError(
                f"texts.{rounded[0]}.weights: products with int8 weights overflow float16; give precision: bfloat16"
            )
        return self

    @property
    def to_fill(self) -> Buckets:
        """Every bucket, those of `aspect` too."""
        return Buckets(tuple(Bucket.parse(name) for name in self.buckets), self.aspect.tables)


def with_absolute_paths(config: PrecomputeConfig) -> PrecomputeConfig:
    """Local paths made absolute: a Ray worker's current folder is not the driver's."""
    found = _located({"vae": config.vae})
    texts = {
        name: tower.model_copy(update=_located({"model": tower.model, "tokenizer": tower.tokenizer}))
        for name, tower in config.texts.items()
    }
    features = {
        name: tower.model_copy(update=_located({"model": tower.model})) for name, tower in config.features.items()
    }
    here = {"input": str(Path(config.input).absolute())} if Path(config.input).is_dir() else {}
    output = config.output.absolute() if isinstance(config.output, Path) else config.output
    workers, scratch = config.workers, config.workers.scratch
    workers = workers.model_copy(update={"scratch": scratch and scratch.absolute()})
    towers = {**found, "texts": texts, "features": features}
    source = config.source.absolute() if isinstance(config.source, Path) else config.source
    changes = {"output": output, "source": source, "workers": workers}
    return config.model_copy(update=changes | towers | here)


def _located(fields: dict[str, Any]) -> dict[str, str]:
    """Those fields that name a folder that is there, with its absolute path."""
    folders = {name: Path(value).absolute() for name, value in fields.items() if value}
    return {name: str(folder) for name, folder in folders.items() if folder.is_dir()}


def describe_encoding(config: PrecomputeConfig) -> EncodingRecord:
    """The encoding record of a run: reads the models' configs and hashes their weights; loads nothing.

    Raises:
        RequestError: a model is missing or of another kind, or a bucket does not fit a tower.
    """
    pixels = config.pixels
    assert config.precision != "auto", "it must be resolved first"
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
            raise RequestError(f"{error}. Choose sides, or aspect.step, in steps of {step}.") from None
    return record


def make_recipe(config: PrecomputeConfig, encoding: EncodingRecord, how: Conversion | None = None) -> Recipe:
    """What a worker needs to know of a run; `how` the numbers of `source` become its own."""
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
        SourceRoot(config.source, how) if config.source is not None and how is not None else None,
    )
