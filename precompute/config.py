"""The config of stage 1, put together from its rooms' own, and what follows from it: encoding record and recipe."""

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from precompute.cluster.fleet import FleetConfig
from precompute.encode.encoders import Precision, TextConfig
from precompute.encode.recipe import Recipe, WorkerConfig
from precompute.input.captions import check_caption_fields
from precompute.input.tars import TarsConfig
from precompute.pixels.buckets import AspectConfig, Buckets
from precompute.pixels.decode import LimitsConfig, PixelsConfig
from shards.base.config import Config
from shards.base.errors import RequestError
from shards.base.store import Place
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord, ImageEncoding, TextEncoding
from shards.format.models import hash_weights, model_folder, read_model_config

TOKENIZER_MUST_HAVE = ("tokenizer_config.json", "vocab.json", "merges.txt")


class WorkersConfig(WorkerConfig, FleetConfig):
    """What one worker takes, and how it goes about its work. Ray runs as many as the cluster holds."""


class PrecomputeConfig(Config):
    """Stage 1: tars of captioned pictures → a latents root."""

    input: str
    """Folder or address of the tars that `make download` wrote."""
    output: Place
    """The latents root: a folder, or an address on an object store, such as s3://bucket/latents."""
    shards: str = "all"
    """Which tars: `00042`, `00000-00099`, commas of both, or `all`."""
    buckets: list[str] = Field(["256x256", "512x512"], min_length=1)
    """WIDTHxHEIGHT in pixels; a picture goes to each that it covers without being enlarged."""
    aspect: AspectConfig = AspectConfig()
    vae: str
    """Folder, or org/repo[@revision]/folder on the hub, of a diffusers AutoencoderKL."""
    text_encoder: str
    """Folder, or hub name, of a transformers CLIPTextModel."""
    tokenizer: str
    """Folder, or hub name, of its CLIPTokenizer."""
    posterior: Literal["moments", "mean"] = "moments"
    """`moments` keeps mean and log-variance, so that training samples afresh each epoch; `mean` is half the size."""
    captions: list[str] = Field(["txt"], min_length=1)
    """Where a sample's captions are: `txt`, its member of that name, or `json:FIELD` of its JSON. Of several, each is
    stored, and the trainer draws one afresh each time."""
    precision: Precision = "float16"
    """Autocast type of both encoders. A sample that overflows is encoded again in float32."""
    text: TextConfig = TextConfig()
    pixels: PixelsConfig = PixelsConfig()
    limits: LimitsConfig = LimitsConfig()
    tars: TarsConfig = TarsConfig()
    workers: WorkersConfig = WorkersConfig()

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

    @property
    def to_fill(self) -> Buckets:
        """Every bucket, those of `aspect` too."""
        return Buckets(tuple(Bucket.parse(name) for name in self.buckets), self.aspect.tables)


def with_absolute_paths(config: PrecomputeConfig) -> PrecomputeConfig:
    """Local paths made absolute: a Ray worker's current folder is not the driver's."""
    local = {name: str(Path(getattr(config, name)).absolute()) for name in ("vae", "text_encoder", "tokenizer")}
    found = {name: path for name, path in local.items() if Path(path).is_dir()}
    here = {"input": str(Path(config.input).absolute())} if Path(config.input).is_dir() else {}
    output = config.output.absolute() if isinstance(config.output, Path) else config.output
    workers, scratch = config.workers, config.workers.scratch
    workers = workers.model_copy(update={"scratch": scratch and scratch.absolute()})
    return config.model_copy(update={"output": output, "workers": workers, **found, **here})


def describe_encoding(config: PrecomputeConfig) -> EncodingRecord:
    """The encoding record of a run: reads the models' configs and hashes their weights; loads nothing.

    Raises:
        RequestError: a model is missing or of another kind, or a bucket does not fit the VAE.
    """
    vae, text_encoder = model_folder(config.vae), model_folder(config.text_encoder)
    tokenizer = model_folder(config.tokenizer)
    vae_config, text_config = read_model_config(vae), read_model_config(text_encoder)
    try:
        downsampling = 2 ** (len(vae_config["block_out_channels"]) - 1)
        length, width = int(text_config["max_position_embeddings"]), int(text_config["hidden_size"])
    except KeyError as error:
        raise RequestError(
            f"{error} is in neither config.json of {vae} (an AutoencoderKL?) nor of {text_encoder} (a CLIPTextModel?)."
        ) from None
    _check_tokenizer(tokenizer, length)
    if vae_config.get("shift_factor"):
        raise RequestError(f"{vae} has a shift_factor; SD-style VAEs have none, and the trainer would not undo it.")
    record = EncodingRecord(
        vae=hash_weights(config.vae, vae),
        text_encoder=hash_weights(config.text_encoder, text_encoder),
        tokenizer=hash_weights(config.tokenizer, tokenizer),
        image=ImageEncoding(
            posterior=config.posterior,
            latent_channels=int(vae_config["latent_channels"]),
            downsampling=downsampling,
            scaling_factor=float(vae_config.get("scaling_factor", 0.18215)),
            crop=config.pixels.crop,
            resampling=config.pixels.resampling,
            decoder=config.pixels.decoder,
            resampler=config.pixels.resampler,
            color="srgb",
        ),
        text=TextEncoding(
            storage=config.text.storage,
            trim=config.text.trim,
            length=length,
            width=width,
            captions=tuple(config.captions),
            max_characters=config.limits.max_caption_characters,
        ),
        compute_dtype=config.precision,
    )
    for bucket in config.to_fill.all:
        try:
            bucket.latent_hw(downsampling)
        except ValueError as error:
            raise RequestError(f"{error}. Choose sides, or aspect.step, in steps of {downsampling}.") from None
    return record


def make_recipe(config: PrecomputeConfig, encoding: EncodingRecord) -> Recipe:
    """What a worker needs to know of a run."""
    return Recipe(encoding, config.to_fill, config.pixels, config.limits, config.tars, config.workers)


def _check_tokenizer(folder: Path, length: int) -> None:
    for name in TOKENIZER_MUST_HAVE:
        if not (folder / name).is_file():
            raise RequestError(f"{folder} is not a CLIP tokenizer folder: it has no {name}.")
    path = folder / "tokenizer_config.json"
    tokenizer_length = json.loads(path.read_text()).get("model_max_length", length)
    if tokenizer_length != length:
        raise RequestError(
            f"The tokenizer in {folder} cuts captions at {tokenizer_length} tokens, but the text encoder takes "
            f"{length}. They are not a pair: give the tokenizer that came with the text encoder."
        )
