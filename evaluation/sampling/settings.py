"""How pictures are drawn, and what names a sample set: all that its pictures depend on, by content."""

import hashlib
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

from pydantic import Field, PositiveInt

from shards.base.config import Config
from shards.base.device import Precision, PrecisionOption
from shards.base.durable import canonical_json
from shards.format.buckets import BucketName

SamplerName = Literal["own", "ddim", "ddpm", "dpm_solver", "euler", "euler_ancestral", "heun", "unipc"]
Codec = Literal["png", "webp"]
VERSION = 1


class SamplingConfig(Config):
    """How pictures are drawn. Several values of `guidance`, `steps` and `sampler` make a sample set each."""

    seed: int = Field(0, ge=0, lt=2**63)
    """With a prompt's id and the picture's index it keys the noise."""
    images_per_prompt: int = Field(1, ge=1)
    """Pictures of each prompt, each from noise of its own."""
    size: BucketName = "512x512"
    """WIDTHxHEIGHT in pixels."""
    guidance: list[float] = Field([8.0], min_length=1)
    """Scales of classifier-free guidance; 1 is none."""
    guidance_input: float | None = None
    """Value for networks that take a guidance scale as an input (guidance-distilled ones). null: the value of the run's
    training; for other models, the pipeline's default."""
    steps: list[PositiveInt] = Field([50], min_length=1)
    """Numbers of sampling steps."""
    sampler: list[SamplerName] = Field(["own"], min_length=1)
    """`own` is the pipeline's; the others are diffusers' schedulers over the same noise."""
    negative_prompt: str | None = None
    """Text that guidance leads away from. null: the input that stood for dropped captions in training, which for most
    models is the empty caption and for others zeros."""
    precision: PrecisionOption = "float32"
    """Type of the whole pipeline. `auto` is that of the sample set; for a new set, it is bfloat16 where a worker's
    device supports it, and float32 elsewhere."""
    batch_size: int = Field(16, ge=1)
    """Pictures at a time, each run with a prompt and, with guidance, without."""
    part_size: int = Field(256, ge=1)
    """Pictures of a part, the unit of work, retry and commit."""
    codec: Codec = "png"
    """Both keep every pixel."""

    @property
    def grid(self) -> list["Setting"]:
        """Every combination, each once."""
        return list(dict.fromkeys(Setting(*values) for values in product(self.guidance, self.steps, self.sampler)))


@dataclass(frozen=True)
class Setting:
    """One point of the grid."""

    guidance: float
    steps: int
    sampler: SamplerName

    def __str__(self) -> str:
        return f"g{self.guidance:g}-s{self.steps}-{self.sampler}"


@dataclass(frozen=True)
class Drawing:
    """All that a sample set's pictures depend on but the model. Batch size and parts are not: they change rounding."""

    prompts: str
    """SHA-256 of the prompts."""
    seed: int
    images_per_prompt: int
    num_samples: int
    size: str
    setting: Setting
    scheduler: str
    """Class of the sampler that was used, and its config's SHA-256."""
    negative_prompt: str | None
    guidance_input: float | None
    precision: Precision
    codec: Codec

    def as_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @property
    def id(self) -> str:
        """Of how pictures are drawn, whatever the model: sample sets of one id can be compared."""
        return hashlib.sha256(canonical_json(self.as_json())).hexdigest()[:16]
