"""Config of `python -m plan`. The defaults describe Stable Diffusion 2 base on A100s.

Every numeric input is a `Fact`, with a unit and a source. An input without a source is marked as `assumed`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, field_validator, model_validator

from shards.base.config import Config
from shards.base.errors import RequestError
from shards.format.buckets import BucketName
from shards.format.towers import ONLY_TEXT, ImageStorage, TextStorage
from train.model.config import optimizer_class

ASSUMED = "assumed"

GPU_KINDS: dict[str, dict[str, tuple[float, str]]] = yaml.safe_load(Path(__file__).with_name("gpus.yaml").read_text())
"""Default (value, source) of each field in the plan's `gpu` section, by GPU kind."""


@dataclass(frozen=True)
class Fact:
    """A numeric input of a plan, with its unit and source."""

    field: str
    value: float
    unit: str
    source: str

    @property
    def assumed(self) -> bool:
        """Whether the value has no source."""
        return self.source == ASSUMED


def fact(unit: str, default: float | None = None, source: str = ASSUMED, **limits: Any) -> Any:
    """Define a config field for a numeric input of the plan. `source` is the source of the default value only."""
    extra: Any = {"unit": unit, "sourced_value": default, "source": source}
    start: Any = ... if default is None else default
    return Field(start, json_schema_extra=extra, **limits)


def _fact_fields(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Yield the field, the value and the properties given to `fact` of each numeric input in a section."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _fact_fields(value, f"{prefix}{name}.")
        elif isinstance(field.json_schema_extra, dict) and "unit" in field.json_schema_extra:
            yield f"{prefix}{name}", value, field.json_schema_extra


class TextNetwork(Config):
    """A text encoder. The fields have the same meaning as in the precompute config, except where noted."""

    config: str
    """Path of the transformers model's config.json, including its `model_type`."""
    class_name: str
    """Class name of the transformers model."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum number of input tokens; null: the model's maximum sequence length."""
    length: int | None = Field(None, ge=1)
    """Number of tokens stored per caption; null: all input tokens."""
    states: bool = True
    """Store the hidden states."""
    pooled: bool = False
    """Store the pooled output."""
    masked: bool = False
    """Mask padding tokens in attention."""
    trim: bool | None = None
    """Overrides `text.trim` for this encoder."""
    storage: TextStorage | None = None
    """Overrides `text.storage` for this encoder."""
    width: int | None = Field(None, ge=1)
    """Overrides `text.width` for this encoder."""


class Networks(Config):
    """Config files of the networks. Networks are built without loading or allocating weights."""

    backbone: str = "configs/phase1.yaml"
    """Training config (YAML) whose `backbone` section names the network and its inputs, and whose `ddp`, `sharding`
    and `sharding_group` determine the traffic between GPUs."""
    vae: str = "configs/vae/sd2.json"
    """Path of the diffusers autoencoder's config.json."""
    texts: dict[str, TextNetwork] = Field(
        {ONLY_TEXT: TextNetwork(config="configs/text_encoder/sd2.json", class_name="CLIPTextModel")}, min_length=1
    )
    """Text encoders, keyed by the names used in the training config."""


class Data(Config):
    """The dataset, and what is stored of it."""

    pictures: int = Field(790_000_000, gt=0)
    """Number of distinct images. Each has one caption, which is encoded once."""
    samples: dict[BucketName, Annotated[int, Field(ge=1)]] = Field(
        {"256x256": 790_000_000, "512x512": 300_000_000}, min_length=1
    )
    """Number of images large enough for each bucket. Stage 1 encodes every bucket listed here."""
    posterior: Literal["moments", "mean"] = "moments"
    """Part of the posterior to store. `moments` takes twice the bytes of `mean`."""
    string_bytes: float = fact("B per sample", 80, ge=0)
    """Combined size of a sample's key and caption."""
    picture_bytes: float = fact("B per picture", 100_000, gt=0)
    """Size of a compressed image, which online encoding reads during training."""


class Image(Config):
    """Storage of image latents."""

    storage: ImageStorage = "int8"
    """Element type; `int8` takes half the bytes of `float16`."""


class Text(Config):
    """Storage of text latents."""

    storage: TextStorage = "float8"
    """Element type; `float8` takes about half the bytes of `float16`."""
    trim: bool = False
    """Store only non-padding tokens."""
    width: int | None = Field(None, ge=1)
    """Number of dimensions onto which hidden states are projected; null: no projection. The FLOPs are those of
    full-width states, so they are slightly too high for projected text."""
    tokens: float = fact("real tokens per caption", 20, gt=0)
    """Mean number of non-padding tokens, including the start and end tokens; used when `trim` is on."""


class Phase(Config):
    """The first training phase."""

    bucket: str = "256x256"
    """Bucket to train on (WIDTHxHEIGHT); one of `data.samples`."""
    steps: int = Field(550_000, gt=0)
    """Number of optimizer steps."""
    global_batch_size: int = Field(2048, gt=0)
    """Number of images per step, summed over all GPUs."""
    microbatch_size: int = Field(128, gt=0)
    """Number of images per GPU in one forward and backward pass. A step's last backward pass all-reduces
    gradients. With sharded weights, every backward pass also averages them within the group."""
    ema: bool = False
    """Maintain an exponential moving average of the weights, which makes checkpoints larger."""

    @property
    def num_images(self) -> int:
        """Number of images trained on, counting repetitions."""
        return self.steps * self.global_batch_size


class SecondPhase(Phase):
    """The second training phase, by default at twice the resolution of the first."""

    bucket: str = "512x512"
    """Bucket to train on (WIDTHxHEIGHT); one of `data.samples`."""
    steps: int = Field(850_000, gt=0)
    """Number of optimizer steps."""
    microbatch_size: int = Field(32, gt=0)
    """Number of images per GPU in one forward and backward pass."""
    ema: bool = True
    """Maintain an exponential moving average of the weights."""


class Gpu(Config):
    """The GPU and its node. Numbers that are not set default to the values in plan/gpus.yaml for the GPU kind."""

    kind: str = "A100"
    """GPU kind: A100, H100 or H200. For any other kind, set every number in this section."""
    gpus_per_node: int = Field(8, gt=0)
    """Number of GPUs per node."""
    price_per_hour: float = fact("$ per GPU-hour", ge=0)
    """Price of one GPU for one hour."""
    peak_tflops: float = fact("TFLOP/s", gt=0)
    """Peak dense bf16 throughput from the datasheet."""
    memory_gb_per_s: float = fact("GB/s", gt=0)
    """Bandwidth of the GPU's memory."""
    link_gb_per_s: float = fact("GB/s per GPU, one way", gt=0)
    """Bandwidth between GPUs of the same node, such as NVLink."""
    network_gbit_per_s: float = fact("Gbit/s per node, one way", gt=0)
    """Bandwidth between nodes."""
    train_utilisation: float = fact("of peak", gt=0, le=1)
    """FLOP/s of the forward and backward pass, including recomputed activations, as a share of the peak. Used for
    buckets without a measured rate."""
    encode_utilisation: float = fact("of peak", gt=0, le=1)
    """Encoding FLOP/s as a share of the peak, used for stages without a measured rate."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_kind(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kind = str(values.get("kind", cls.model_fields["kind"].default))
        given = {name: value for name, value in values.items() if value is not None}
        missing = [name for name, field in cls.model_fields.items() if field.is_required() and name not in given]
        if kind not in GPU_KINDS and missing:
            known = ", ".join(GPU_KINDS)
            raise ValueError(
                f"only the GPU kinds {known} have default values; for {kind}, you must also set {', '.join(missing)}"
            )
        return {name: value for name, (value, _) in GPU_KINDS.get(kind, {}).items()} | given


class Links(Config):
    """Bandwidths of the interconnect and the stores."""

    efficiency: float = fact("of link and network bandwidth", 0.8, gt=0, le=1)
    """Share of the nominal bandwidth that GPUs achieve when they exchange gradients and weights."""
    data_gbit_per_node: float = fact("Gbit/s per node", 20, gt=0)
    """Bandwidth at which one node reads from the store of the latents."""
    data_gbit_total: float = fact("Gbit/s", 400, gt=0)
    """Total read bandwidth of the store of the latents."""
    checkpoint_gbit: float = fact("Gbit/s", 10, gt=0)
    """Write bandwidth for checkpoints. The plan assumes that training waits while a checkpoint is written, so the time
    lost is an upper bound for checkpoints that are written in the background, the trainer's default."""


class Storage(Config):
    """Price of storing the latents, and for how long they are stored."""

    price_per_tb_month: float = fact("$ per TB and month", 23, ge=0)
    """Storage price; 1 TB is 10^12 bytes."""
    months: float = Field(1, ge=0)
    """Number of months for which the latents are stored."""


class Regions(Config):
    """Regions in which the latents and the GPUs are located."""

    data: dict[str, float] = Field({"here": 1.0}, min_length=1)
    """Share of the samples stored in each region; the shares must sum to 1."""
    gpus: str = "here"
    """Region of the GPUs."""
    egress_per_gb: float = fact("$ per GB", 0.02, ge=0)
    """Price of reading data from a different region."""

    @field_validator("data")
    @classmethod
    def _shares_add_up(cls, shares: dict[str, float]) -> dict[str, float]:
        if abs(sum(shares.values()) - 1) > 1e-6 or min(shares.values(), default=0) < 0:
            raise ValueError(f"regions.data is {shares}; its shares must not be negative and must sum to 1")
        return shares


class Checkpoints(Config):
    """Checkpoint interval and retention, and how often training fails."""

    every_steps: int | None = Field(None, gt=0)
    """Steps between checkpoints; null: the interval that minimizes the expected training time."""
    keep: int = Field(3, gt=0)
    """Number of checkpoints kept per phase."""
    gpu_hours_per_failure: float = fact(
        "GPU-hours", 10_000, "follows from MosaicML's two hardware failures in 20,051 A100-hours", gt=0
    )
    """Mean time between failures, multiplied by the number of GPUs."""
    restart_seconds: float = fact("s", 600, ge=0)
    """Time from a failure to the first step after the restart."""


class SourcedValue(Config):
    """A number with its source."""

    value: float
    """Value that the source confirms. If the field has a different value, the source is ignored."""
    source: str
    """Measurement, publication or price quote that the value comes from."""


class Plan(Config):
    """A training run, from images to a trained backbone."""

    title: str = "Stable Diffusion 2 base"
    """Heading of the report."""
    encoding: Literal["beforehand", "online"] = "beforehand"
    """`beforehand` precomputes latents; `online` encodes every image each time it is trained on."""
    every_size: bool = False
    """Precompute every bucket for all images, as MosaicML did, instead of only for images that are large enough."""
    gpus: int | None = Field(None, gt=0)
    """GPU count to add to the table and highlight."""
    gpu_counts: list[Annotated[int, Field(gt=0)]] = Field([8, 16, 32, 64, 128, 256, 512, 1024], min_length=1)
    """GPU counts to list in the table."""
    least_speedup: float = Field(1.5, gt=1, le=2)
    """Scaling counts as worthwhile if doubling the number of GPUs gives at least this speedup."""
    measured: list[str] = Field([])
    """Benchmark files (docs/how-to/plan.md). Files for other GPU kinds are skipped."""
    networks: Networks = Networks()
    data: Data = Data()
    image: Image = Image()
    text: Text = Text()
    optimizer: str = "adamw"
    """Kind of optimizer, which affects the memory traffic of a step and the size of a checkpoint."""
    phase1: Phase = Phase()
    phase2: SecondPhase | None = SecondPhase()
    """The second phase; null: train one phase only."""
    gpu: Gpu = Field(default_factory=lambda: Gpu.model_validate({}))
    links: Links = Links()
    storage: Storage = Storage()
    regions: Regions = Regions()
    checkpoints: Checkpoints = Checkpoints()
    sources: dict[str, SourcedValue] = Field({})
    """Sources for values set in this file, by field. Values without a source are marked as assumed."""

    @field_validator("optimizer")
    @classmethod
    def _optimizer_exists(cls, kind: str) -> str:
        optimizer_class(kind)
        return kind

    @property
    def phases(self) -> list[Phase]:
        return [self.phase1, *([self.phase2] if self.phase2 else [])]

    @property
    def counts(self) -> list[int]:
        """GPU counts in the table, ascending. Counts that do not divide every global batch size are dropped."""
        requested = sorted({*self.gpu_counts, *([self.gpus] if self.gpus else [])})
        return [gpus for gpus in requested if all(phase.global_batch_size % gpus == 0 for phase in self.phases)]

    def facts(self) -> list[Fact]:
        """Return the plan's numeric inputs with their sources.

        A source applies only to the value that it was given for. Inputs without a source are marked as assumed.
        """
        own = {name: (entry.value, entry.source) for name, entry in self.sources.items()}
        of_kind = {f"gpu.{name}": entry for name, entry in GPU_KINDS.get(self.gpu.kind, {}).items()}
        facts = []
        for field, value, extra in _fact_fields(self):
            default = (extra["sourced_value"], extra["source"])
            candidates = (own.get(field, default), of_kind.get(field, default), default)
            source = next((source for of, source in candidates if of == value), ASSUMED)
            facts.append(Fact(field, value, extra["unit"], source))
        return facts

    def check(self) -> None:
        """Check that the sections are consistent.

        Raises:
            RequestError: a bucket has more samples than there are images, a phase's bucket is not in `data.samples`, a
                requested GPU count does not divide a global batch size, or `sources` names an unknown field.
        """
        for bucket, samples in self.data.samples.items():
            if samples > self.data.pictures:
                raise RequestError(
                    f"data.samples.{bucket} is {samples:,}, but data.pictures is only {self.data.pictures:,}. An image "
                    f"is stored at most once in each bucket. Lower data.samples.{bucket} or raise data.pictures."
                )
        for number, phase in enumerate(self.phases, 1):
            if phase.bucket not in self.data.samples:
                known = ", ".join(self.data.samples)
                raise RequestError(
                    f"phase{number}.bucket is {phase.bucket}, which is not in data.samples ({known}). "
                    f"Add the bucket and its number of samples to data.samples."
                )
            required = [self.gpus] if self.gpus else [] if self.counts else self.gpu_counts
            for gpus in required:
                if phase.global_batch_size % gpus:
                    raise RequestError(
                        f"phase{number}.global_batch_size is {phase.global_batch_size}, which cannot be split evenly "
                        f"across {gpus} GPUs. Choose a GPU count that divides the batch size, or change "
                        f"phase{number}.global_batch_size."
                    )
        unknown = set(self.sources) - {fact.field for fact in self.facts()}
        if unknown:
            raise RequestError(
                f"`sources` contains fields that are not numeric inputs of the plan: {', '.join(sorted(unknown))}. "
                f"Check the spelling; docs/reference/config.md lists the fields."
            )
