"""Config of the optimizer, the moving averages and the distribution over processes, without torch: it is read first."""

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
    """Of `constant`."""
    sigma_rel: Width = 0.1
    """Of `power`: the average's width (standard deviation in time) as a share of the steps done."""
    start_step: int | None = Field(None, ge=0)
    """Step from which it is held; null: never. It takes no memory before."""
    snapshot_every: int | None = Field(None, ge=1)
    """Steps between snapshots of further averages, held from the first step on, from which `python -m train ema RUN`
    rebuilds any width afterwards; null: none are held."""
    std: list[Width] = Field([0.05, 0.1], min_length=1)
    """Widths of those, as `sigma_rel`; each takes 4 bytes a parameter, on the device and in every checkpoint."""
    snapshot_dtype: Literal["float16", "float32"] = "float16"
    """Type of the snapshots' numbers; float16 rounds each to 1/2048 of itself."""

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
    """AdamW, and the clip before it."""

    lr: float = Field(1e-4, gt=0)
    """The learning rate after warm-up."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """AdamW's decays of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's, decoupled from the gradient."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    max_skipped_steps: int = Field(100, ge=0)
    """A step whose gradient is not finite leaves weights and optimizer alone and is counted; more stop the run."""


class ScheduleConfig(Config):
    """The learning rate over the steps."""

    kind: Literal["constant", "cosine"] = "constant"
    """After warm-up: as it is, or half a cosine down to zero at `max_steps`."""
    warmup_steps: int = Field(10_000, ge=0)
    """Linear from zero."""


class DdpConfig(Config):
    """How processes that each hold the whole network exchange gradients (`sharding: none`)."""

    bucket_mb: int = Field(500, ge=1)
    """Gradients travel in so many MB at once, while the backward pass goes on; a compiled network is cut there."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """Type in which they travel; bfloat16 is half the bytes, and rounds each to 1/256 of itself."""

    def handler(self) -> DistributedDataParallelKwargs:
        """As accelerate is told of it.

        Gradients are views of what travels, so that none is copied back. The graph is not declared static: all that
        would spare is the search for unused weights, which is off.
        """
        from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

        hook = DDPCommunicationHookType.BF16 if self.gradients == "bfloat16" else DDPCommunicationHookType.NO
        return DistributedDataParallelKwargs(bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=True, comm_hook=hook)
