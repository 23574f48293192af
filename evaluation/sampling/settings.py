"""Sampling settings, and the identity of a sample set: everything that its images depend on, except the model."""

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
    """Settings for drawing images. Every combination of `guidance`, `steps` and `sampler` gives a separate sample
    set."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the noise. An image's noise depends on the seed, the prompt id and the image's index."""
    images_per_prompt: int = Field(1, ge=1)
    """Number of images per prompt, each drawn from different noise."""
    size: BucketName = "512x512"
    """Size of the images (WIDTHxHEIGHT, in pixels)."""
    guidance: list[float] = Field([8.0], min_length=1)
    """Classifier-free guidance scales. 1 disables guidance."""
    guidance_input: float | None = None
    """Guidance scale passed to the network as an input, as in guidance-distilled models. null: the scale used in the
    run's training; for other models, the pipeline's default."""
    steps: list[PositiveInt] = Field([50], min_length=1)
    """Numbers of sampling steps per image."""
    sampler: list[SamplerName] = Field(["own"], min_length=1)
    """Samplers. `own` is the pipeline's own scheduler; the others are diffusers schedulers with the pipeline's noise
    schedule."""
    negative_prompt: str | None = None
    """Text that guidance moves away from. null: the input that replaced dropped captions in training, which is the
    empty caption for most models and zeros for others."""
    precision: PrecisionOption = "float32"
    """Data type of the whole pipeline. `auto`: the data type of an existing sample set; for a new one, bfloat16 if the
    workers' device supports it, otherwise float32."""
    batch_size: int = Field(16, ge=1)
    """Number of images per batch. With guidance, the network gets two inputs per image."""
    part_size: int = Field(256, ge=1)
    """Number of images per part. Parts are the units of work, retry and commit."""
    codec: Codec = "png"
    """File format of the images. Both formats are lossless."""

    @property
    def grid(self) -> list["Setting"]:
        """All combinations of guidance, steps and sampler, without duplicates."""
        return list(dict.fromkeys(Setting(*values) for values in product(self.guidance, self.steps, self.sampler)))


@dataclass(frozen=True)
class Setting:
    """One combination of guidance, steps and sampler."""

    guidance: float
    steps: int
    sampler: SamplerName

    def __str__(self) -> str:
        return f"g{self.guidance:g}-s{self.steps}-{self.sampler}"


@dataclass(frozen=True)
class Drawing:
    """Everything that the images of a sample set depend on, except the model.

    The batch size and part size are not included, because they affect only rounding.
    """

    prompts: str
    """SHA-256 of the prompts."""
    seed: int
    images_per_prompt: int
    num_samples: int
    size: str
    setting: Setting
    scheduler: str
    """Class of the scheduler, and a hash of its config."""
    negative_prompt: str | None
    guidance_input: float | None
    precision: Precision
    codec: Codec

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON, with a format version."""
        return {"version": VERSION, **asdict(self)}

    @property
    def id(self) -> str:
        """Hash of the drawing. Sample sets from different models are comparable if their drawings have the same id."""
        return hashlib.sha256(canonical_json(self.as_json())).hexdigest()[:16]
