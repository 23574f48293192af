"""Config classes for the optimizer, the moving averages and DDP. They must not need torch, which is imported later."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PlainValidator, SerializeAsAny, ValidationInfo, field_validator

from shards.base.config import Config

if TYPE_CHECKING:
    import torch
    from accelerate.utils import DistributedDataParallelKwargs
    from torch import nn


def _check_decimals(width: float) -> float:
    if width != round(width, 3):
        raise ValueError(
            f"{width!r} has more than three decimals, but the name of an average's folder has three; round it, to at "
            f"least 0.001"
        )
    return width


Width = Annotated[float, Field(gt=0, lt=0.28)]
"""Width of an average: its standard deviation in time, divided by the number of completed steps. An average that
weights all steps equally has a width of 1/√12 = 0.289."""
WidthInName = Annotated[Width, AfterValidator(_check_decimals)]
"""Width of an average whose folder is named after it."""
Momentum = Annotated[float, Field(ge=0, lt=1)]
Sharding = Literal["none", "grad_op", "full"]
Checkpointing = bool | Annotated[float, Field(gt=0, lt=1)]
"""Share of the activations that the backward pass recomputes: none (false), some (a number), or those of all blocks
(true)."""


class EmaConfig(Config):
    """The exponential moving average of the weights."""

    kind: Literal["constant", "power"] = "constant"
    """`power` widens the average in proportion to the number of completed steps (Karras et al., 2024)."""
    decay: float = Field(0.9999, gt=0, lt=1)
    """Decay per step, if `kind` is `constant`."""
    sigma_rel: Width = 0.1
    """Width of the average if `kind` is `power`: its standard deviation in time, as a fraction of the completed
    steps."""
    start_step: int | None = Field(None, ge=1)
    """Step after which the average starts; it takes no memory before then. null: no average."""
    snapshot_every: int | None = Field(None, ge=1)
    """Steps between snapshots of the averages in `std`, from which `python -m train ema RUN` can later rebuild an
    average of any width; null: no snapshots."""
    std: list[WidthInName] = Field([0.05, 0.1], min_length=1)
    """Widths of the averages in snapshots, defined like `sigma_rel`, with at most three decimals. Each average takes 4
    bytes per parameter, both in memory and in checkpoints."""
    snapshot_dtype: Literal["float16", "float32"] = "float16"
    """Data type of snapshots; float16 rounds to within 1/2048 of each value."""

    @field_validator("std")
    @classmethod
    def _check_widths(cls, std: list[float]) -> list[float]:
        if len(set(std)) < len(std):
            raise ValueError("two of the widths are equal; remove one of them")
        return std


def average_name(std: float) -> str:
    """Return the name of a post-hoc average's folder in checkpoints and snapshots, such as `ema-0.050`."""
    return f"ema-{std:.3f}"


class OptimizerConfig(Config):
    """Settings that all optimizers share. A subclass, listed in `OPTIMIZERS`, adds the settings of one kind."""

    state_bytes: ClassVar[int]
    """Bytes of optimizer state per parameter, as held in memory and in checkpoints."""

    kind: str
    """Name of the optimizer."""
    lr: float = Field(1e-4, gt=0)
    """Learning rate after warm-up."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum global norm of the gradients; larger gradients are scaled down."""
    max_skipped_steps: int = Field(100, ge=0)
    """Maximum number of steps, among any 10,000 successive steps, that may be skipped because of non-finite gradients
    before a run stops."""

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer for these parameters.

        Its per-parameter state must consist of tensors, because checkpoints save tensors by parameter name. The
        scheduled learning rate is set in all of its parameter groups.

        Args:
            parameters: the parameters to train, by name.
        """
        raise NotImplementedError

    @classmethod
    def step_bytes(cls) -> int:
        """Return the number of bytes per parameter that an optimizer step reads from and writes to memory.

        A step reads the weight, the gradient and the state, and writes the weight and the state. Weights and gradients
        are float32.
        """
        return 4 + 4 + cls.state_bytes + 4 + cls.state_bytes


class AdamWConfig(OptimizerConfig):
    """AdamW with gradient clipping."""

    state_bytes: ClassVar[int] = 8  # two moments in float32

    kind: Literal["adamw"] = "adamw"
    """Name of the optimizer."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """AdamW's decay rates for the first and second moments."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's ε."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's decoupled weight decay."""

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
        """Return torch's AdamW with its fused kernel, which skips a step if `found_inf` is 1."""
        import torch

        return torch.optim.AdamW(
            parameters.values(),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=True,
        )


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {"adamw": AdamWConfig}
"""Config class for each kind of optimizer. To add a kind, derive a class from `OptimizerConfig` and list it here."""


def optimizer_class(kind: str) -> type[OptimizerConfig]:
    """Return the config class for a kind of optimizer.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind not in OPTIMIZERS:
        close = difflib.get_close_matches(kind, OPTIMIZERS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"there is no optimizer of kind {kind}{hint}; choose one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[kind]


def _parse_optimizer(value: Any, info: ValidationInfo) -> OptimizerConfig:
    """Validate an `optimizer` section with the config class for its kind, which is `adamw` by default."""
    if isinstance(value, OptimizerConfig):
        return value
    if not isinstance(value, dict):
        raise ValueError("optimizer must be a section, such as {kind: adamw, lr: 1.0e-4}")
    return optimizer_class(str(value.get("kind", "adamw"))).model_validate(value, context=info.context)


if TYPE_CHECKING:
    AnyOptimizer = OptimizerConfig
else:
    # with the union, `--help` and the config reference include the fields of every kind
    AnyOptimizer = Annotated[SerializeAsAny[reduce(or_, OPTIMIZERS.values())], PlainValidator(_parse_optimizer)]


class ScheduleConfig(Config):
    """The learning rate schedule."""

    kind: Literal["constant", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or falling to zero at `max_steps` along half a cosine."""
    warmup_steps: int = Field(10_000, ge=0)
    """Number of steps of linear warm-up from zero."""


class DdpConfig(Config):
    """Gradient exchange between processes if each process holds the whole network (`sharding: none`)."""

    bucket_mb: int = Field(500, ge=1)
    """Size in MB of the buckets that are all-reduced during the backward pass. If the gradients of a
    compiled graph take more than this, the graph is split at the bucket boundaries."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """Data type of all-reduced gradients. bfloat16 halves the traffic. It rounds each gradient to within 1/256, and
    also every partial sum of the processes' gradients, so the error grows with the number of processes."""

    def handler(self) -> DistributedDataParallelKwargs:
        """Return Accelerate's handler for these settings.

        Gradients are views of the buckets, so they need not be copied back. The graph is not declared static, because
        that would only avoid the search for unused parameters, which is disabled anyway.
        """
        from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

        hook = DDPCommunicationHookType.BF16 if self.gradients == "bfloat16" else DDPCommunicationHookType.NO
        return DistributedDataParallelKwargs(bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=True, comm_hook=hook)
