"""The exponential moving average of the weights."""

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from shards.base.config import Config


class EmaConfig(Config):
    """The exponential moving average of the weights."""

    kind: Literal["constant", "power"] = "constant"
    """`power` widens the average with the run, to the same share of it at every step (Karras et al., 2024)."""
    decay: float = Field(0.9999, gt=0, lt=1)
    """Of `constant`."""
    sigma_rel: float = Field(0.1, gt=0, lt=0.28)
    """Of `power`: the average's width (standard deviation in time) as a share of the steps done."""
    start_step: int | None = Field(None, ge=0)
    """Step from which it is held; null: never. It takes no memory before."""


def ema_decay(config: EmaConfig, step: int) -> float:
    """How much of the average remains at the update of step `step` (the first is 1).

    `power` is the power function profile of Karras et al., "Analyzing and improving the training dynamics of diffusion
    models" (2024), equation 127: β(t) = (1 − 1/t)^(γ + 1), which weighs the weights of step τ by τ^γ. t counts the
    run's steps, also where the average starts late: the weights at its start then stand for all that was before.
    """
    if config.kind == "constant":
        return config.decay
    return (1.0 - 1.0 / step) ** (power_exponent(config.sigma_rel) + 1.0)


def power_exponent(sigma_rel: float) -> float:
    """γ of the power profile whose width is `sigma_rel` of the run.

    Appendix C of the same: σ_rel = (γ + 1)^½ (γ + 2)^−1 (γ + 3)^−½, that is
    γ³ + 7γ² + (16 − σ_rel^−2)·γ + (12 − σ_rel^−2) = 0, whose largest root it is.
    """
    inverse = sigma_rel**-2
    return float(np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse]).real.max())


class Ema:
    """A float32 copy of each parameter, by name, from `start_step` on: average ← decay·average + (1 − decay)·weight."""

    def __init__(self, config: EmaConfig):
        self.config = config
        self.average: dict[str, Tensor] | None = None
        """None before `start_step`, and without one."""

    def begin(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Start from the weights as they are; returns the average."""
        self.average = {name: value.detach().float().clone() for name, value in parameters}
        return self.average

    def has_begun(self, step: int) -> bool:
        """Whether an average is held after `step` optimizer steps."""
        return self.config.start_step is not None and step >= self.config.start_step

    @torch.no_grad()
    def update(self, parameters: Iterable[tuple[str, Tensor]], step: int) -> None:
        """After optimizer step `step` (the first is 1), with the parameters that it began with, by name."""
        if not self.has_begun(step):
            return
        if self.average is None:
            self.begin(parameters)
            return
        by_name = dict(parameters)
        weights = [by_name[name].detach().float() for name in self.average]
        torch._foreach_lerp_(list(self.average.values()), weights, 1.0 - ema_decay(self.config, step))
