"""Moving averages of the weights: the run's own average, and post-hoc averages, from which an average of any width can
be rebuilt later."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from train.model.config import EmaConfig, average_name


def ema_decay(config: EmaConfig, step: int) -> float:
    """Return the decay with which the average is updated after step `step`, counted from 1.

    `power` is the power function profile of Karras et al., "Analyzing and improving the training dynamics of diffusion
    models" (2024), equation 127: β(t) = (1 − 1/t)^(γ + 1), which weights step τ by τ^γ. t counts the steps of the run
    even if the average starts late. In that case, the weights at its start represent all earlier steps.
    """
    if config.kind == "constant":
        return config.decay
    return (1.0 - 1.0 / step) ** (power_exponent(config.sigma_rel) + 1.0)


def power_exponent(sigma_rel: float) -> float:
    """Return the exponent γ of the power profile whose relative width is `sigma_rel`.

    According to Karras et al. (2024), appendix C, σ_rel = (γ + 1)^½ (γ + 2)^−1 (γ + 3)^−½. So γ is the largest root of
    γ³ + 7γ² + (16 − σ_rel^−2)·γ + (12 − σ_rel^−2) = 0.
    """
    inverse = sigma_rel**-2
    return float(np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse]).real.max())


def correlation(a_step: np.ndarray, a_std: np.ndarray, b_step: np.ndarray, b_std: np.ndarray) -> np.ndarray:
    """Return the inner products of power profiles that end at these steps and have these widths. Shapes broadcast.

    The inner product is ∫ p_a(t)·p_b(t) dt, where p(t) = (γ + 1)·t^γ / T^(γ + 1) on [0, T] (Karras et al., 2024,
    algorithm 3 and equation 151).
    """
    a, b = (np.vectorize(power_exponent)(std) for std in (a_std, b_std))
    exponent = np.where(a_step < b_step, b, -a)
    return (a + 1) * (b + 1) * (a_step / b_step) ** exponent / ((a + b + 1) * np.maximum(a_step, b_step))


def posthoc_coefficients(steps: Sequence[int], stds: Sequence[float], step: int, std: float) -> np.ndarray:
    """Return the coefficients (n,) with which n averages best approximate the average of width `std` ending at `step`.

    They are the least-squares fit of the profiles (Karras et al., 2024, algorithm 3), computed in float64 and scaled to
    sum to 1.

    Args:
        steps: the steps at which the n averages end.
        stds: widths of the n averages.
    """
    t, width = np.asarray(steps, np.float64), np.asarray(stds, np.float64)
    gram = correlation(t[:, None], width[:, None], t, width)
    x = np.linalg.solve(gram, correlation(t, width, np.array(float(step)), np.array(std)))
    return np.asarray(x / x.sum())


class Ema:
    """Float32 moving average of each parameter, which starts at `start_step`.

    The update is average ← decay·average + (1 − decay)·weight.
    """

    def __init__(self, config: EmaConfig):
        self.config = config
        self.average: dict[str, Tensor] | None = None
        """Average of each parameter, by name; None before `start_step`, or always if `start_step` is null."""

    def begin(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Start the average from the current weights, and return it."""
        self.average = {name: value.detach().float().clone() for name, value in parameters}
        return self.average

    def has_begun(self, step: int) -> bool:
        """Return whether the average exists after `step` optimizer steps."""
        return self.config.start_step is not None and step >= self.config.start_step

    @torch.no_grad()
    def update(self, parameters: Iterable[tuple[str, Tensor]], step: int) -> None:
        """Update the average after optimizer step `step`, counted from 1.

        Args:
            parameters: the same named parameters with which the average was started.
        """
        if not self.has_begun(step):
            return
        if self.average is None:
            self.begin(parameters)
            return
        by_name = dict(parameters)
        weights = [by_name[name].detach().float() for name in self.average]
        torch._foreach_lerp_(list(self.average.values()), weights, 1.0 - ema_decay(self.config, step))

    @torch.no_grad()
    def swap(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Swap the average and the weights in place, if there is an average. A second call restores both bit-exactly.

        At most one additional tensor is in memory at any time.
        """
        by_name = dict(parameters)
        for name, average in (self.average or {}).items():
            weight = by_name[name].detach().clone()
            by_name[name].copy_(average)
            average.copy_(weight)


def make_averages(config: EmaConfig) -> dict[str, Ema]:
    """Return the run's averages by checkpoint folder: `ema`, and the post-hoc averages if snapshots are configured.

    The first update overwrites a post-hoc average's initial value entirely (β(1) = 0), so the average covers exactly
    the steps of the run. If snapshots are enabled later, the weights at that point represent all earlier steps.
    """
    stds = config.std if config.snapshot_every is not None else []
    posthoc = {average_name(std): Ema(EmaConfig(kind="power", sigma_rel=std, start_step=1)) for std in stds}
    return {"ema": Ema(config)} | posthoc
