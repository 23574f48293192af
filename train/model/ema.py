"""The exponential moving average of the weights."""

import numpy as np
import torch
from torch import Tensor

from train.config import EmaConfig


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
    """Holds a float32 copy of each parameter, by name: average ← decay·average + (1 − decay)·weight."""

    def __init__(self, parameters: dict[str, Tensor]):
        self.average = {name: value.detach().float().clone() for name, value in parameters.items()}

    @torch.no_grad()
    def update(self, parameters: dict[str, Tensor], decay: float) -> None:
        """One step; `parameters` has the names it was made with."""
        weights = [parameters[name].detach().float() for name in self.average]
        torch._foreach_lerp_(list(self.average.values()), weights, 1.0 - decay)
