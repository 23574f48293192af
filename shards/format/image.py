"""How a picture's numbers are stored.

Image latents: exact float16; or int8, means with a scale per channel, log-variances in even steps. The columns are
`image_latents`, and `image_scales` beside int8. Features: `features.NAME`, and `feature_scales.NAME` beside e4m3 codes.

torch is imported inside the functions that need it: reading a config or a root must not cost its import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shards.format.buckets import Bucket
from shards.format.text import quantise_in_chunks, stored
from shards.format.towers import FeatureTower, ImageTower

if TYPE_CHECKING:
    from torch import Tensor

LOG_VARIANCE_RANGE = (-30.0, 20.0)
"""To which diffusers' DiagonalGaussianDistribution clamps them: nothing beyond it is ever used."""
LARGEST_CODE = 127
NUM_STEPS = 255
INTEGERS_FROM = 1.5 * 2**23
"""From 2^23 to 2^24 float32 holds the integers alone."""


def quantise(latents: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """(…, planes, h, w) floats → int8 codes of the same shape, and float32 scales (…, channels).

    The first `channels` planes, means, are rounded to multiples of max|x| / 127 of their plane; so the error is at most
    half of that. What follows, log-variances, are clamped to their range and rounded to 1/255 of it: to 10 % of a
    variance.
    """
    import torch

    means, log_variances = latents.float().split([channels, latents.shape[-3] - channels], dim=-3)
    scales = (means.abs().amax(dim=(-2, -1)) / LARGEST_CODE).clamp(min=torch.finfo(torch.float32).tiny)
    codes = rounded(means / scales[..., None, None]).clamp(-LARGEST_CODE, LARGEST_CODE)
    low, high = LOG_VARIANCE_RANGE
    steps = rounded((log_variances.clamp(low, high) - low) * (NUM_STEPS / (high - low))) - (LARGEST_CODE + 1)
    return torch.cat([codes, steps], dim=-3).to(torch.int8), scales


def rounded(values: Tensor) -> Tensor:
    """float32 below 2^22 → as torch.round, which divides 4,096 numbers and more among threads: for 1 us of work these
    wait for each other for up to a millisecond."""
    return values + INTEGERS_FROM - INTEGERS_FROM


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `quantise`: float32 of the codes' shape, on the codes' device."""
    import torch

    channels = scales.shape[-1]
    means, steps = codes.float().split([channels, codes.shape[-3] - channels], dim=-3)
    low, high = LOG_VARIANCE_RANGE
    log_variances = (steps + (LARGEST_CODE + 1)) * ((high - low) / NUM_STEPS) + low
    return torch.cat([means * scales[..., None, None], log_variances], dim=-3)


def pack(tower: ImageTower, latents: Iterable[Tensor]) -> Iterator[dict[str, np.ndarray]]:
    """(planes, h, w) latents of each picture, floats on the CPU → the columns of each one's sample."""
    if tower.storage == "float16":
        yield from ({"image_latents": of_picture.half().numpy()} for of_picture in latents)
        return
    rows = (of_picture[None] for of_picture in latents)
    for codes, scales in quantise_in_chunks(partial(quantise, channels=tower.channels), rows):
        yield {"image_latents": codes[0], "image_scales": scales[0]}


def unpack(latents: Tensor, scales: Tensor | None) -> Tensor:
    """Stored (…, planes, h, w), and their scales where there are any → float32."""
    return latents.float() if scales is None else dequantise(latents, scales)


def draw(moments: Tensor, noise: Tensor) -> Tensor:
    """(…, 2C, h, w) mean and log-variance, and (…, C, h, w) standard normals → mean + σ·n, as diffusers'
    DiagonalGaussianDistribution."""
    mean, log_variance = moments.chunk(2, dim=-3)
    return mean + (0.5 * log_variance.clamp(*LOG_VARIANCE_RANGE)).exp() * noise


def columns(tower: ImageTower, bucket: Bucket) -> dict[str, str]:
    """The MDS column types of `pack`'s result."""
    height, width = bucket.latent_hw(tower.downsampling)
    types = {"image_latents": f"ndarray:{tower.storage}:{tower.num_planes},{height},{width}"}
    return types | ({"image_scales": f"ndarray:float32:{tower.channels}"} if tower.storage == "int8" else {})


def pack_features(name: str, tower: FeatureTower, features: Iterable[Tensor]) -> Iterator[dict[str, np.ndarray]]:
    """(tokens, width) features of each picture, floats on the CPU → the columns of each one's sample."""
    for arrays in stored(features, tower.storage):
        yield dict(zip((f"features.{name}", f"feature_scales.{name}"), arrays, strict=False))


def feature_columns(name: str, tower: FeatureTower, bucket: Bucket) -> dict[str, str]:
    """The MDS column types of `pack_features`' result.

    Raises:
        ValueError: the bucket does not fit the tower.
    """
    height, width = tower.grid(bucket)
    tokens, dtype = height * width, "float16" if tower.storage == "float16" else "uint8"
    types = {f"features.{name}": f"ndarray:{dtype}:{tokens},{tower.width}"}
    return types | ({f"feature_scales.{name}": f"ndarray:float16:{tokens}"} if tower.storage == "float8" else {})
