"""The exponential moving average of the weights."""

import torch
from torch import Tensor


class Ema:
    """Holds a float32 copy of each parameter, by name: average ← decay·average + (1 − decay)·weight."""

    def __init__(self, parameters: dict[str, Tensor], decay: float):
        self.decay = decay
        self.average = {name: value.detach().float().clone() for name, value in parameters.items()}

    @torch.no_grad()
    def update(self, parameters: dict[str, Tensor]) -> None:
        """One step; `parameters` has the names it was made with."""
        weights = [parameters[name].detach().float() for name in self.average]
        torch._foreach_lerp_(list(self.average.values()), weights, 1.0 - self.decay)
