"""A run's optimizer step: learning rate schedule, gradient clipping, and skipping of steps with non-finite gradients.

`OPTIMIZERS` in train/model/config.py lists the kinds of optimizer and how each is built.
"""

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from shards.base.errors import RequestError
from train.model.config import OptimizerConfig, ScheduleConfig
from train.model.sharding import gather


def learning_rate(step: int, base: float, config: ScheduleConfig, max_steps: int) -> float:
    """Return the learning rate for optimizer step `step`, counted from 0.

    It rises linearly during warm-up. Afterwards it is constant, or falls to zero at `max_steps` along half a cosine.
    """
    if step < config.warmup_steps:
        return base * (step + 1) / config.warmup_steps
    if config.kind == "constant":
        return base
    progress = (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps)
    return base * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


def freeze_except(network: nn.Module, patterns: Sequence[str] | None) -> None:
    """Freeze all parameters of `network` whose names match none of the glob patterns. None freezes nothing.

    Frozen parameters are not passed to the optimizer, but checkpoints, averages and exports still contain them.

    Raises:
        RequestError: a pattern matches no parameter.
    """
    if patterns is None:
        return
    parameters = dict(network.named_parameters())
    for pattern in patterns:
        if not fnmatch.filter(parameters, pattern):
            close = difflib.get_close_matches(pattern, parameters, n=3, cutoff=0.3)
            raise RequestError(
                f"train_only contains the pattern {pattern}, which matches no parameter of the network. Parameter "
                f"names look like {', '.join(close or list(parameters)[:3])}; `*` stands for any part of a name. "
                f"Correct the pattern."
            )
    for name, parameter in parameters.items():
        parameter.requires_grad_(any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))


def build_optimizer(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the configured optimizer for the parameters that require gradients."""
    return config.build({name: value for name, value in parameters.items() if value.requires_grad})


class Optimizer:
    """A torch optimizer with the run's learning rate schedule and gradient clipping, wrapped by accelerate."""

    def __init__(
        self,
        torch_optimizer: torch.optim.Optimizer,
        accelerator: Accelerator,
        config: OptimizerConfig,
        schedule: ScheduleConfig,
        max_steps: int,
    ):
        self.torch_optimizer = torch_optimizer
        self.accelerator = accelerator
        self.prepared: Any = accelerator.prepare_optimizer(torch_optimizer)
        self.is_fused = bool(torch_optimizer.defaults.get("fused"))
        self.base_lr, self.max_grad_norm = config.lr, config.max_grad_norm
        self.schedule, self.max_steps = schedule, max_steps

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        return float(self.prepared.param_groups[0]["lr"])

    def step(self, model: nn.Module, step: int, keep_memory: bool = False) -> tuple[Tensor, Tensor]:
        """Clip the gradients, which are the same on all ranks, and do optimizer step `step`, counted from 0.

        A step with a non-finite gradient is skipped: it changes neither weights nor optimizer state.

        Args:
            keep_memory: see `forget_gradients`.

        Returns:
            The gradient norm before clipping, and 1 if the step was skipped, otherwise 0. Both are tensors on the
            device.
        """
        for group in self.prepared.param_groups:
            group["lr"] = learning_rate(step, self.base_lr, self.schedule, self.max_steps)
        grad_norm = gather(self.accelerator.clip_grad_norm_(model.parameters(), self.max_grad_norm))
        skipped = (~torch.isfinite(grad_norm)).float()
        if self.is_fused:
            # the fused kernel checks on the device whether to skip the step, so the host does not wait
            self.torch_optimizer.found_inf = skipped  # type: ignore[attr-defined]
            self.prepared.step()
        elif self.accelerator.scaler is not None or not skipped:  # the loss scaler skips non-finite steps itself
            self.prepared.step()
        self.forget_gradients(keep_memory)
        return grad_norm, skipped

    def forget_gradients(self, keep_memory: bool = False) -> None:
        """Discard the gradients, and free their memory unless `keep_memory`, which sets them to zero instead."""
        self.torch_optimizer.zero_grad(set_to_none=not keep_memory)
