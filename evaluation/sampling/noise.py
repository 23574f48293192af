"""Noise as a pure function of (seed, prompt id, index): the same on any worker, in any batch.

Philox-4x64-10 (Salmon et al., SC 2011), NumPy's: it promises the raw stream of its bit generators, and not what it
makes of them, so the normals are made here.
"""

import hashlib
import json
import math

import numpy as np
import torch
from torch import Tensor

EARLIER_BITS = 11
"""Of 64, so that 53 are left: a float64's."""


def key_of(seed: int, prompt_id: str, index: int) -> int:
    """128 bits that name a sample's stream."""
    name = json.dumps([seed, prompt_id, index]).encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:16], "little")


def initial_noise(seed: int, prompt_id: str, index: int, shape: tuple[int, ...]) -> Tensor:
    """`shape` float32 standard normals on the CPU, by the Box-Muller transform in float64."""
    count = math.prod(shape)
    words = np.random.Philox(key=key_of(seed, prompt_id, index)).random_raw(count + count % 2)
    u1, u2 = np.split(((words >> EARLIER_BITS) + 0.5) * 2.0**-53, 2)  # (0, 1)
    radius, angle = np.sqrt(-2 * np.log(u1)), 2 * np.pi * u2
    normals = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(normals[:count].reshape(shape).astype(np.float32))


def step_generator(seed: int, prompt_id: str, index: int) -> torch.Generator:
    """What a stochastic sampler draws from, on the CPU. (torch keeps 32 bits of a seed: two of 30,000 samples may
    share the noise of their steps, never that of their start.)"""
    return torch.Generator().manual_seed(key_of(seed, prompt_id, index) & (2**32 - 1))
