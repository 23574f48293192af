"""The plan's YAML: what is to be trained, on what, at what prices. The defaults: Stable Diffusion 2 base on A100s."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from plan.facts import GPU_KINDS, Fact, fact, list_facts
from plan.machines import Checkpoints, Gpu, Links, Regions, Storage
from shards.base.config import Config
from shards.base.errors import RequestError
from shards.format.buckets import Bucket
from shards.format.towers import ONLY_TEXT, ImageStorage, TextStorage


class TextNetwork(Config):
    """A text tower; its fields are as in stage 1, where they are not said to be otherwise."""

    config: str
    """Of the transformers model (JSON, with its `model_type`)."""
    class_name: str
    """Of the transformers model."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens that it is given; null: its positions."""
    length: int | None = Field(None, ge=1)
    """Tokens that are kept of these; null: all."""
    states: bool = True
    """Hidden states are stored."""
    pooled: bool = False
    """The pooled output is stored."""
    masked: bool = False
    """Padding is hidden."""
    trim: bool | None = None
    """In place of `text.trim`."""
    storage: TextStorage | None = None
    """In place of `text.storage`."""


class Networks(Config):
    """Config files of the networks; their weights are never built."""

    backbone: str = "configs/phase1.yaml"
    """A training config (YAML), whose `backbone` section names the network and says how it is called."""
    vae: str = "configs/vae/sd2.json"
    """diffusers autoencoder."""
    texts: dict[str, TextNetwork] = Field(
        {ONLY_TEXT: TextNetwork(config="configs/text_encoder/sd2.json", class_name="CLIPTextModel")}, min_length=1
    )
    """Text towers, by the names that the training config has for them."""


class Data(Config):
    """The pictures."""

    pictures: int = Field(790_000_000, gt=0)
    """Distinct pictures; each has one caption, encoded once."""
    samples: dict[str, int] = Field({"256x256": 790_000_000, "512x512": 300_000_000}, min_length=1)
    """Bucket → how many pictures are large enough for it; stage 1 encodes every bucket named here."""
    posterior: Literal["moments", "mean"] = "moments"
    """As in stage 1: moments are 2 × latent channels, the mean is latent channels."""
    string_bytes: float = fact("B per sample", 80, ge=0)
    """A sample's key and caption."""
    picture_bytes: float = fact("B per picture", 100_000, gt=0)
    """A compressed picture, read when encoding online."""

    @field_validator("samples")
    @classmethod
    def _buckets_parse(cls, samples: dict[str, int]) -> dict[str, int]:
        for name, count in samples.items():
            Bucket.parse(name)
            if count < 1:
                raise ValueError(f"bucket {name} has {count} samples; it needs at least 1")
        return samples


class Image(Config):
    """As in stage 1: how image latents are stored."""

    storage: ImageStorage = "int8"
    """`float16`, or `int8` at half the bytes."""


class Text(Config):
    """As in stage 1: how text latents are stored."""

    storage: TextStorage = "float8"
    """`float16`, or `float8` at about half the bytes."""
    trim: bool = False
    """Keep the real tokens alone."""
    tokens: float = fact("real tokens per caption", 20, gt=0)
    """Begin and end included; used when `trim` is on."""


class Phase(Config):
    """One training phase; the defaults are the first's."""

    bucket: str = "256x256"
    """WIDTHxHEIGHT; one of `data.samples`."""
    steps: int = Field(550_000, gt=0)
    """Optimizer steps."""
    global_batch_size: int = Field(2048, gt=0)
    """Images per step, over all GPUs."""
    microbatch_size: int = Field(64, gt=0)
    """Images a GPU takes at once; gradients travel during the last one's backward pass."""
    ema: bool = False
    """Keep an average of the weights: it adds to the checkpoint."""


class SecondPhase(Phase):
    """The second phase, at twice the side."""

    bucket: str = "512x512"
    """As in the first phase, as are all fields here."""
    steps: int = Field(850_000, gt=0)
    """Optimizer steps."""
    microbatch_size: int = Field(16, gt=0)
    """Images a GPU takes at once."""
    ema: bool = True
    """Keep an average of the weights."""


class Vouched(Config):
    """A number with its source."""

    value: float
    """The vouched value; the source does not hold for another one."""
    source: str
    """Who measured, published or quoted it."""


class Plan(Config):
    """One training, from pictures to a U-Net."""

    title: str = "Stable Diffusion 2 base"
    """Heads the report."""
    encoding: Literal["beforehand", "online"] = "beforehand"
    """`online` encodes each image whenever it is trained on, and precomputes nothing."""
    every_size: bool = False
    """Precompute each bucket for all pictures, as MosaicML did, not only for those large enough."""
    gpus: int | None = Field(None, gt=0)
    """A number of GPUs to add to the table and to point out."""
    gpu_counts: list[Annotated[int, Field(gt=0)]] = Field([8, 16, 32, 64, 128, 256, 512, 1024], min_length=1)
    """The table's rows."""
    least_speedup: float = Field(1.5, gt=1, le=2)
    """Twice the GPUs pay while training gets this many times faster."""
    measured: list[str] = Field([])
    """Benchmark files (docs/how-to/plan.md); those of other GPU kinds are left aside."""
    networks: Networks = Networks()
    data: Data = Data()
    image: Image = Image()
    text: Text = Text()
    phase1: Phase = Phase()
    phase2: SecondPhase | None = SecondPhase()
    """The second phase; null: there is none."""
    gpu: Gpu = Field(default_factory=lambda: Gpu.model_validate({}))
    links: Links = Links()
    storage: Storage = Storage()
    regions: Regions = Regions()
    checkpoints: Checkpoints = Checkpoints()
    sources: dict[str, Vouched] = Field({})
    """Field → value and source, for numbers of this file that are more than assumptions."""

    @property
    def phases(self) -> list[Phase]:
        return [self.phase1, *([self.phase2] if self.phase2 else [])]

    @property
    def counts(self) -> list[int]:
        """The table's numbers of GPUs, in rising order: those that can share every global batch."""
        asked = sorted({*self.gpu_counts, *([self.gpus] if self.gpus else [])})
        return [gpus for gpus in asked if all(phase.global_batch_size % gpus == 0 for phase in self.phases)]

    def facts(self) -> list[Fact]:
        """The numbers about the world that the plan rests on, each with its source or as assumed."""
        of_kind = {f"gpu.{name}": entry for name, entry in GPU_KINDS.get(self.gpu.kind, {}).items()}
        return list_facts(self, of_kind | {name: (entry.value, entry.source) for name, entry in self.sources.items()})

    def check(self) -> None:
        """Raise RequestError where the parts do not fit each other."""
        for number, phase in enumerate(self.phases, 1):
            if phase.bucket not in self.data.samples:
                known = ", ".join(self.data.samples)
                raise RequestError(
                    f"phase{number}.bucket is {phase.bucket}, of which data.samples says nothing (it has {known}). "
                    f"Add the bucket's number of samples there."
                )
            wanted = [self.gpus] if self.gpus else [] if self.counts else self.gpu_counts
            for gpus in wanted:
                if phase.global_batch_size % gpus:
                    raise RequestError(
                        f"{gpus} GPUs cannot share phase{number}'s global batch of {phase.global_batch_size} images: "
                        f"it is not a multiple of {gpus}. Choose GPUs that divide it, or another global_batch_size."
                    )
        unknown = set(self.sources) - {fact.field for fact in self.facts()}
        if unknown:
            raise RequestError(f"sources names {', '.join(sorted(unknown))}, which no plan rests on. Mend the name.")
