"""Where flow matching's times fall, t in (0, 1] with 1 for pure noise: distributions and their shift, on numbers alone.

All are of Esser et al., "Scaling rectified flow transformers for high-resolution image synthesis" (2024), in float32.
"""

import math

import torch
from torch import Tensor

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


def shifted(t: Tensor, alpha: float) -> Tensor:
    """αt / (1 + (α − 1)·t), equation 23, written so that 1 stays 1."""
    return t / (t + (1.0 - t) / alpha)
