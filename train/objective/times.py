"""Distributions of flow matching's times t, and their shift. t is in (0, 1], and 1 is pure noise.

All formulas are from Esser et al., "Scaling rectified flow transformers for high-resolution image synthesis" (2024).
"""

import math

import torch
from torch import Tensor

SMALLEST = 2.0**-33
"""The smallest uniform draw, which is the lower bound of all times."""


def mode(u: Tensor, scale: float) -> Tensor:
    """Map uniforms (N,) to times that favour the middle or, with a negative scale, both ends (section 3.1)."""
    return (1.0 - u - scale * (torch.cos(math.pi / 2 * u) ** 2 - 1.0 + u)).clamp(SMALLEST, 1.0)


def cosmap(u: Tensor) -> Tensor:
    """Map uniforms u (N,) to the times t with the log-SNR of the cosine schedule at u (section 3.1).

    t = 1 − 1/(tan(πu/2) + 1), rewritten without the pole of the tangent.
    """
    sine, cosine = torch.sin(math.pi / 2 * u), torch.cos(math.pi / 2 * u)
    return (sine / (sine + cosine)).clamp(SMALLEST, 1.0)


def shifted(t: Tensor, alpha: float) -> Tensor:
    """Return αt / (1 + (α − 1)·t), equation 23, rewritten so that t = 1 gives exactly 1."""
    return t / (t + (1.0 - t) / alpha)
