"""The plan's sections about machines: GPUs, bandwidths, storage, regions, failures."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from plan.facts import GPU_KINDS, fact
from shards.base.config import Config


class Gpu(Config):
    """The GPU and its node. A number left out is the kind's (plan/gpus.yaml)."""

    kind: str = "A100"
    """A100, H100, H200, or another with every number given."""
    gpus_per_node: int = Field(8, gt=0)
    """GPUs in one machine."""
    price_per_hour: float = fact("$ per GPU-hour", ge=0)
    """What one GPU costs."""
    peak_tflops: float = fact("TFLOP/s", gt=0)
    """Dense bf16, datasheet."""
    memory_gb_per_s: float = fact("GB/s", gt=0)
    """Device memory."""
    link_gb_per_s: float = fact("GB/s per GPU, one way", gt=0)
    """Between the GPUs of a node."""
    network_gbit_per_s: float = fact("Gbit/s per node, one way", gt=0)
    """Between nodes, for gradients."""
    train_utilisation: float = fact("of peak", gt=0, le=1)
    """Where no measurement says how fast training is."""
    encode_utilisation: float = fact("of peak", gt=0, le=1)
    """Where no measurement says how fast encoding is."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_kind(cls, values: Any) -> Any:
        kind = values.get("kind", cls.model_fields["kind"].default)
        given = {name: value for name, value in values.items() if value is not None}
        missing = [name for name, field in cls.model_fields.items() if field.is_required() and name not in given]
        if kind not in GPU_KINDS and missing:
            known = ", ".join(GPU_KINDS)
            raise ValueError(f"the kind {kind} is none of {known}; give its {', '.join(missing)} as well")
        return {name: value for name, (value, _) in GPU_KINDS.get(kind, {}).items()} | given


class Links(Config):
    """Bandwidths other than the GPU's own."""

    gradient_bytes: Literal[2, 4] = 4
    """Bytes per parameter that the gradient all-reduce sends: 4 in float32."""
    bucket_mb: float = Field(25, gt=0)
    """Gradients that travel together, in MB, as torch's DDP has them; nothing hides the last bucket's traffic."""
    efficiency: float = fact("of link and network bandwidth", 0.8, gt=0, le=1)
    """What an all-reduce reaches."""
    data_gbit_per_node: float = fact("Gbit/s per node", 20, gt=0)
    """From the latents' store into one node."""
    data_gbit_total: float = fact("Gbit/s", 400, gt=0)
    """What the latents' store gives in all."""
    checkpoint_gbit: float = fact("Gbit/s", 10, gt=0)
    """One checkpoint being written; training waits for it."""


class Storage(Config):
    """Keeping the latents."""

    price_per_tb_month: float = fact("$ per TB and month", 23, ge=0)
    """1 TB is 10^12 bytes."""
    months: float = Field(1, ge=0)
    """How long they are kept."""


class Regions(Config):
    """Where the latents and the GPUs are."""

    data: dict[str, float] = Field({"here": 1.0}, min_length=1)
    """Region → its share of the samples; the shares add up to 1."""
    gpus: str = "here"
    """The region of the GPUs."""
    egress_per_gb: float = fact("$ per GB", 0.02, ge=0)
    """Reading across regions."""

    @field_validator("data")
    @classmethod
    def _shares_add_up(cls, shares: dict[str, float]) -> dict[str, float]:
        if abs(sum(shares.values()) - 1) > 1e-6 or min(shares.values(), default=0) < 0:
            raise ValueError("the regions' shares must be at least 0 and add up to 1")
        return shares


class Checkpoints(Config):
    """Checkpoints and failures."""

    every_steps: int | None = Field(None, gt=0)
    """None: the interval that loses least time."""
    keep: int = Field(3, gt=0)
    """How many are kept, for each phase."""
    gpu_hours_per_failure: float = fact(
        "GPU-hours", 10_000, "follows from MosaicML's two hardware failures in 20,051 A100-hours", gt=0
    )
    """Mean time between failures × GPUs."""
    restart_seconds: float = fact("s", 600, ge=0)
    """From a failure to the first new step."""
