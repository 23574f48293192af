"""AdamW at a scheduled learning rate, behind a clip. A step whose gradient is not finite changes nothing."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from train.model.config import OptimizerConfig, ScheduleConfig
from train.model.sharding import whole


def learning_rate(step: int, base: float, config: ScheduleConfig, max_steps: int) -> float:
    """The learning rate of optimizer step `step` (the first is 0): linear warm-up, then constant or half a cosine."""
    if step < config.warmup_steps:
        return base * (step + 1) / config.warmup_steps
    if config.kind == "constant":
        return base
    progress = (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps)
    return base * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


def make_adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """The optimizer, whose fused kernel leaves everything as it is where `found_inf` is 1."""
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


class Optimizer:
    """The optimizer of a run, as accelerate wrapped it."""

    def __init__(
        self,
        adamw: torch.optim.AdamW,
        accelerator: Accelerator,
        config: OptimizerConfig,
        schedule: ScheduleConfig,
        max_steps: int,
    ):
        self.adamw = adamw
        self.accelerator = accelerator
        self.prepared: Any = accelerator.prepare_optimizer(adamw)
        self.base_lr, self.max_grad_norm = config.lr, config.max_grad_norm
        self.schedule, self.max_steps = schedule, max_steps

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return float(self.prepared.param_groups[0]["lr"])

    def step(self, model: nn.Module, step: int) -> tuple[Tensor, Tensor]:
        """Optimizer step number `step` (the first is 0), on gradients that all ranks hold alike.

        Returns:
            The gradient's norm before clipping; and 1 where it was not finite, and the step was skipped, else 0.
        """
        for group in self.prepared.param_groups:
            group["lr"] = learning_rate(step, self.base_lr, self.schedule, self.max_steps)
        grad_norm = whole(self.accelerator.clip_grad_norm_(model.parameters(), self.max_grad_norm))
        # decided on the device, so that nobody waits for it
        skipped = (~torch.isfinite(grad_norm)).float()
        self.adamw.found_inf = skipped  # type: ignore[attr-defined]
        self.prepared.step()
        self.forget_gradients()
        return grad_norm, skipped

    def forget_gradients(self) -> None:
        """Drop them, and their memory."""
        self.adamw.zero_grad(set_to_none=True)
