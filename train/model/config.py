"""Config of the optimizer, the moving averages and DDP. It is read before torch is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from shards.base.config import Config

if TYPE_CHECKING:
    from accelerate.utils import DistributedDataParallelKwargs

Width = Annotated[float, Field(gt=0, lt=0.28)]
"""Standard deviation in time of an average, as a share of the steps done; a flat average has 1/√12 = 0.289."""
Momentum = Annotated[float, Field(ge=0, lt=1)]
Sharding = Literal["none", "grad_op", "full"]


class EmaConfig(Config):
    """The exponential moving average of the weights."""

    kind: Literal["constant", "power"] = "constant"
    """`power` widens the average with the run, to the same share of it at every step (Karras et al., 2024)."""
    decay: float = Field(0.9999, gt=0, lt=1)
    """Decay per step, for `constant`."""
    sigma_rel: Width = 0.1
    """Width of the average for `power`: its standard deviation in time, as a share of the steps done."""
    start_step: int | None = Field(None, ge=0)
    """First step of the average; null: none. It takes no memory before that step."""
    snapshot_every: int | None = Field(None, ge=1)
    """Steps between snapshots of the averages in `std`, from which `python -m train ema RUN` rebuilds any width
    afterwards; null: no snapshots."""
    std: list[Width] = Field([0.05, 0.1], min_length=1)
    """Widths of these averages, like `sigma_rel`. Each takes 4 bytes per parameter, also in checkpoints."""
    snapshot_dtype: Literal["float16", "float32"] = "float16"
    """Data type of snapshots; float16 rounds to within 1/2048 of each value."""

    @field_validator("std")
    @classmethod
    def _differ(cls, std: list[float]) -> list[float]:
        if len({average_name(width) for width in std}) < len(std):
            raise ValueError(f"{std} names a width twice; three decimals tell them apart")
        return std


def average_name(std: float) -> str:
    """The folder of a post-hoc average in checkpoints and snapshots: `ema-0.050`."""
    return f"ema-{std:.3f}"


class OptimizerConfig(Config):
    """AdamW with gradient clipping."""

    lr: float = Field(1e-4, gt=0)
    """The learning rate after warm-up."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """AdamW's decays of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's ε."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    max_skipped_steps: int = Field(100, ge=0)
    """Number of steps with a non-finite gradient, which change no weights, that a run tolerates before it stops."""


class ScheduleConfig(Config):
    """The learning rate schedule."""

    kind: Literal["constant", "cosine"] = "constant"
    """After warm-up: constant, or half a cosine down to zero at `max_steps`."""
    warmup_steps: int = Field(10_000, ge=0)
    """Steps of linear warm-up from zero."""


class DdpConfig(Config):
    """Gradient exchange between processes that each hold the whole network (`sharding: none`)."""

    bucket_mb: int = Field(500, ge=1)
    """Size in MB of the buckets that are all-reduced during the backward pass. A compiled network is split there."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """Data type of all-reduced gradients; bfloat16 halves the bytes and rounds to within 1/256 of each value."""

    def handler(self) -> DistributedDataParallelKwargs:
        """Return Accelerate's handler for these settings.

        Gradients are views of the buckets, so nothing is copied back. The graph is not declared static, because that
        would only save the search for unused parameters, which is off anyway.
        """
        from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

        hook = DDPCommunicationHookType.BF16 if self.gradients == "bfloat16" else DDPCommunicationHookType.NO
        return DistributedDataParallelKwargs(bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=True, comm_hook=hook)
