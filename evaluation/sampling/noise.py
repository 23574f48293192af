"""Noise as a pure function of (seed, prompt id, index), so an image does not depend on its worker or its batch.

The generator is NumPy's Philox-4x64-10 (Salmon et al., SC 2011). NumPy guarantees the raw streams of its bit generators
across versions, but not the distributions computed from them, so normals are computed here.
"""

import hashlib
import json
import math

import numpy as np
import torch
from torch import Tensor

DROPPED_BITS = 11
"""Number of low bits dropped from each 64-bit word, which leaves the 53 bits of precision of a float64."""


def key_of(seed: int, prompt_id: str, index: int) -> int:
    """Return the 128-bit key of a sample's random stream."""
    name = json.dumps([seed, prompt_id, index]).encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:16], "little")


def initial_noise(seed: int, prompt_id: str, index: int, shape: tuple[int, ...]) -> Tensor:
    """Return standard normals of the given shape, float32 on the CPU, by the Box-Muller transform in float64."""
    count = math.prod(shape)
    words = np.random.Philox(key=key_of(seed, prompt_id, index)).random_raw(count + count % 2)
    u1, u2 = np.split(((words >> DROPPED_BITS) + 0.5) * 2.0**-53, 2)  # (0, 1)
    radius, angle = np.sqrt(-2 * np.log(u1)), 2 * np.pi * u2
    normals = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(normals[:count].reshape(shape).astype(np.float32))


def step_generator(seed: int, prompt_id: str, index: int) -> torch.Generator:
    """Return a CPU generator for the noise that a stochastic sampler adds at each step.

    torch keeps only 32 bits of a seed, so by chance, two of 30,000 samples may share their per-step noise. They never
    share their initial noise.
    """
    return torch.Generator().manual_seed(key_of(seed, prompt_id, index) & (2**32 - 1))
