"""Config sections for GPUs, bandwidths, storage, regions, checkpoints and failures."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from plan.facts import GPU_KINDS, fact
from shards.base.config import Config


class Gpu(Config):
    """The GPU and its node. Unset numbers default to those of the GPU kind in plan/gpus.yaml."""

    kind: str = "A100"
    """A100, H100 or H200. For any other kind, set every number in this section."""
    gpus_per_node: int = Field(8, gt=0)
    """GPUs per node."""
    price_per_hour: float = fact("$ per GPU-hour", ge=0)
    """Price of one GPU for one hour."""
    peak_tflops: float = fact("TFLOP/s", gt=0)
    """Peak dense bf16 throughput from the datasheet."""
    memory_gb_per_s: float = fact("GB/s", gt=0)
    """Bandwidth of the GPU's memory."""
    link_gb_per_s: float = fact("GB/s per GPU, one way", gt=0)
    """Bandwidth between GPUs of the same node, such as NVLink."""
    network_gbit_per_s: float = fact("Gbit/s per node, one way", gt=0)
    """Bandwidth between nodes, used by the gradient all-reduce."""
    train_utilisation: float = fact("of peak", gt=0, le=1)
    """Training FLOP/s as a share of the peak, used for buckets without a measured rate."""
    encode_utilisation: float = fact("of peak", gt=0, le=1)
    """Encoding FLOP/s as a share of the peak, used for stages without a measured rate."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_kind(cls, values: Any) -> Any:
        kind = values.get("kind", cls.model_fields["kind"].default)
        given = {name: value for name, value in values.items() if value is not None}
        missing = [name for name, field in cls.model_fields.items() if field.is_required() and name not in given]
        if kind not in GPU_KINDS and missing:
            known = ", ".join(GPU_KINDS)
            raise ValueError(f"the GPU kind {kind} is not one of {known}; set its {', '.join(missing)} as well")
        return {name: value for name, (value, _) in GPU_KINDS.get(kind, {}).items()} | given


class Links(Config):
    """Bandwidths of the interconnect and the stores, and the settings of the gradient all-reduce."""

    gradient_bytes: Literal[2, 4] = 4
    """Bytes per gradient element in the all-reduce; 4 is float32."""
    bucket_mb: float = Field(25, gt=0)
    """Size of a DDP gradient bucket in MB. The all-reduce of the last bucket does not overlap with computation."""
    efficiency: float = fact("of link and network bandwidth", 0.8, gt=0, le=1)
    """Share of the nominal bandwidth that an all-reduce achieves."""
    data_gbit_per_node: float = fact("Gbit/s per node", 20, gt=0)
    """Bandwidth at which one node reads from the store of the latents."""
    data_gbit_total: float = fact("Gbit/s", 400, gt=0)
    """Total read bandwidth of the store of the latents."""
    checkpoint_gbit: float = fact("Gbit/s", 10, gt=0)
    """Write bandwidth for checkpoints. Training waits while a checkpoint is written."""


class Storage(Config):
    """Price and duration of storing the latents."""

    price_per_tb_month: float = fact("$ per TB and month", 23, ge=0)
    """Storage price; 1 TB is 10^12 bytes."""
    months: float = Field(1, ge=0)
    """Number of months the latents are stored."""


class Regions(Config):
    """Regions of the latents and the GPUs."""

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
    """Checkpoints and failures."""

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
