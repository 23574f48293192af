"""The config of stage 1, and the encoding record that follows from it."""

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from precompute.cluster.fleet import FleetConfig
from precompute.input.captions import JSON_PREFIX
from precompute.input.tars import TarPolicy
from precompute.pixels.decode import LimitsConfig, PixelsConfig
from shards.base.config import Config
from shards.base.errors import RequestError
from shards.base.store import Place
from shards.format.buckets import AspectTable, Bucket, bucket_rules
from shards.format.encoding import EncodingRecord, ImageEncoding, TextEncoding
from shards.format.models import hash_weights, model_folder, read_model_config
from shards.format.text import TextStorage

TOKENIZER_MUST_HAVE = ("tokenizer_config.json", "vocab.json", "merges.txt")


class TextConfig(Config):
    """How text latents are stored."""

    storage: TextStorage = "float16"
    """`float16` is exact; `float8` halves the bytes at 2.6 % relative error."""
    trim: bool = False
    """Store the real tokens alone; the U-Net then gets a cross-attention mask."""


class AspectConfig(Config):
    """Buckets of other shapes than those in `buckets`: of each base, a picture goes to the one of the nearest ratio."""

    bases: list[int] = Field([])
    """Sides of the squares whose areas the buckets have, about; `[512]` is a table, `[]` is none."""
    step: int = Field(64, ge=1)
    """Their sides are multiples of this."""
    max_ratio: float = Field(2.0, ge=1)
    """Of the longer side to the shorter."""

    @property
    def tables(self) -> list[AspectTable]:
        """A table for each base."""
        return [AspectTable(base, self.step, self.max_ratio) for base in sorted(self.bases)]

    @model_validator(mode="after")
    def _check(self) -> "AspectConfig":
        if len(set(self.bases)) != len(self.bases):
            raise ValueError("a base is named twice")
        for base in self.bases:
            if base <= 0 or base % self.step:
                raise ValueError(f"base {base} is not a multiple of step {self.step}")
        bucket_rules([], self.tables)
        return self


class WorkersConfig(FleetConfig):
    """What one worker takes. Ray runs as many as the cluster holds."""

    decode_threads: int = Field(8, ge=1)
    """Threads that decode pictures, in each worker."""
    batch_size: int = Field(64, ge=1)
    """Pictures of up to 512x512 that are encoded together; the last batch of a tar is smaller."""
    compile: bool = False
    """Compile both encoders with torch.compile: a minute for each bucket when a worker starts, then faster on a GPU.
    It changes latents by rounding alone, as the kind of GPU does, so it is in the receipts and not in encoding.json."""
    scratch: Path | None = None
    """Local folder of attempts at tars, each as large as its latents, where `output` is an address; the system's
    temporary folder if not given."""
    isolate_from: int = Field(2, ge=1)
    """Attempt from which pictures are decoded in child processes, so that one that kills its decoder is found and
    rejected as `decoder_crash`; 1: always."""


class TarsConfig(Config):
    """What is done with tars that are damaged."""

    policy: TarPolicy = "reject"
    """`reject` fails the shard of a tar that lost anything; `salvage` takes the sound samples, and records the loss."""
    check_sha256: bool = False
    """Hold each picture against the `sha256` of its JSON, where there is one: for tars that keep the bytes as served,
    as `make download` has it, not for ones whose pictures img2dataset encoded again."""


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
    precision: Literal["float32", "float16", "bfloat16"] = "float16"
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
        for field in fields:
            if field != "txt" and not (field.startswith(JSON_PREFIX) and len(field) > len(JSON_PREFIX)):
                raise ValueError(f"{field!r} names no caption; give txt or json:FIELD, such as json:blip_caption")
        if len(set(fields)) != len(fields):
            raise ValueError("a caption is named twice")
        return fields

    @property
    def covering(self) -> list[Bucket]:
        """`buckets`: each holds every picture that covers it."""
        return [Bucket.parse(name) for name in self.buckets]

    @property
    def rules(self) -> dict[Bucket, str]:
        """Every bucket → which pictures it holds."""
        return bucket_rules(self.covering, self.aspect.tables)

    @property
    def bucket_list(self) -> list[Bucket]:
        """Every bucket, those of `aspect` too, smallest first."""
        return sorted(self.rules)


def with_absolute_paths(config: PrecomputeConfig) -> PrecomputeConfig:
    """Local paths made absolute: a Ray worker's current folder is not the driver's."""
    local = {name: str(Path(getattr(config, name)).absolute()) for name in ("vae", "text_encoder", "tokenizer")}
    found = {name: path for name, path in local.items() if Path(path).is_dir()}
    here = {"input": str(Path(config.input).absolute())} if Path(config.input).is_dir() else {}
    output = config.output.absolute() if isinstance(config.output, Path) else config.output
    return config.model_copy(update={"output": output, **found, **here})


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
    for bucket in config.bucket_list:
        try:
            bucket.latent_hw(downsampling)
        except ValueError as error:
            raise RequestError(f"{error}. Choose sides, or aspect.step, in steps of {downsampling}.") from None
    return record


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
