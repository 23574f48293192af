"""Where flow matching's times fall, t in (0, 1] with 1 for pure noise: distributions and their shift, on numbers alone.

All are of Esser et al., "Scaling rectified flow transformers for high-resolution image synthesis" (2024), in float32.
"""

import math
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from shards.base.config import Config

SMALLEST = 2.0**-33
"""The smallest uniform draw: times lie in (0, 1]."""


def mode(u: Tensor, scale: float) -> Tensor:
    """Times of uniforms (N,) that dwell in the middle, or with a negative scale at the ends: section 3.1."""
    return (1.0 - u - scale * (torch.cos(math.pi / 2 * u) ** 2 - 1.0 + u)).clamp(SMALLEST, 1.0)


def cosmap(u: Tensor) -> Tensor:
    """Times of uniforms (N,), by which t has the log-SNR that the cosine schedule has at u: section 3.1.

    1 − 1/(tan(πu/2) + 1), written without the pole of the tangent.
    """
    sine, cosine = torch.sin(math.pi / 2 * u), torch.cos(math.pi / 2 * u)
    return (sine / (sine + cosine)).clamp(SMALLEST, 1.0)


class ShiftConfig(Config):
    """Moves the drawn times towards noise, t → αt / (1 + (α − 1)·t): larger pictures need more of it to be hidden."""

    kind: Literal["constant", "log_linear", "square_root"] = "constant"
    """α is `factor` for all (SD3); or e^μ, with μ linear in a picture's tokens (FLUX.1); or `factor` times the root of
    the tokens over `base_tokens` (equation 23)."""
    factor: float = Field(1.0, gt=0)
    """Of `constant` and `square_root`; 1 leaves the times of the base size as they are."""
    base_tokens: int = Field(256, ge=1)
    """Tokens at which μ is `base_shift`."""
    max_tokens: int = Field(4096, ge=1)
    """Tokens at which μ is `max_shift`; beyond, the line goes on."""
    base_shift: float = 0.5
    """Of `log_linear`."""
    max_shift: float = 1.15
    """Of the same."""
    patch: int = Field(2, ge=1)
    """A token is so many latents wide and high."""

    @model_validator(mode="after")
    def _check(self) -> "ShiftConfig":
        if self.kind == "log_linear" and self.max_tokens <= self.base_tokens:
            raise ValueError(f"max_tokens {self.max_tokens} is not above base_tokens {self.base_tokens}")
        return self

    def alpha(self, latent_hw: tuple[int, int]) -> float:
        """α of pictures whose latents are (h, w)."""
        tokens = latent_hw[0] * latent_hw[1] // self.patch**2
        if self.kind == "constant":
            return self.factor
        if self.kind == "square_root":
            return self.factor * math.sqrt(tokens / self.base_tokens)
        slope = (self.max_shift - self.base_shift) / (self.max_tokens - self.base_tokens)
        return math.exp(self.base_shift + slope * (tokens - self.base_tokens))

    def scheduler_settings(self, scheduler: str, latent_hw: tuple[int, int]) -> dict[str, Any]:
        """Fields by which a diffusers scheduler of this class steps where training's times were moved to.

        Where a scheduler cannot follow the picture's size, as pictures of the latents (h, w) ask for.
        """
        if scheduler == "DPMSolverMultistepScheduler":
            return {"flow_shift": self.alpha(latent_hw)}
        if scheduler != "FlowMatchEulerDiscreteScheduler":
            return {}
        if self.kind != "log_linear":
            return {"shift": self.alpha(latent_hw)}
        lengths = {"base_image_seq_len": self.base_tokens, "max_image_seq_len": self.max_tokens}
        return {"use_dynamic_shifting": True, "base_shift": self.base_shift, "max_shift": self.max_shift, **lengths}


def shifted(t: Tensor, alpha: float) -> Tensor:
    """αt / (1 + (α − 1)·t), equation 23, written so that 1 stays 1."""
    return t / (t + (1.0 - t) / alpha)
