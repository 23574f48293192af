"""Storage of image latents and features.

Image latents are stored as exact float16, or as int8, with one scale per channel for the means and uniform steps for
the log-variances. The columns are `image_latents` and, for int8, `image_scales`. Features are stored in `features.NAME`
and, for e4m3 codes, `feature_scales.NAME`.

torch is imported inside the functions that need it, so that reading a config or a root does not require this slow
import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shards.format.buckets import Bucket
from shards.format.text import encode_states, quantise_in_chunks
from shards.format.towers import FeatureTower, ImageTower

if TYPE_CHECKING:
    from torch import Tensor

LOG_VARIANCE_RANGE = (-30.0, 20.0)
"""Range to which diffusers' DiagonalGaussianDistribution clamps log-variances. Values beyond it never affect a
result."""
LARGEST_CODE = 127
NUM_STEPS = 255
ROUNDING_OFFSET = 1.5 * 2**23
"""Midpoint of [2^23, 2^24], where the float32 values are exactly the integers."""


def quantise(latents: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Quantise (…, planes, h, w) floats to int8 codes of the same shape and float32 scales (…, channels).

    The first `channels` planes, the means, are rounded to multiples of max|x| / 127, computed per plane, so the error
    is at most half a step. The remaining planes, the log-variances, are clamped to their range and rounded to 1/255 of
    it, which changes a variance by at most 10 %.
    """
    import torch

    means, log_variances = latents.float().split([channels, latents.shape[-3] - channels], dim=-3)
    scales = (means.abs().amax(dim=(-2, -1)) / LARGEST_CODE).clamp(min=torch.finfo(torch.float32).tiny)
    codes = fast_round(means / scales[..., None, None]).clamp(-LARGEST_CODE, LARGEST_CODE)
    low, high = LOG_VARIANCE_RANGE
    steps = fast_round((log_variances.clamp(low, high) - low) * (NUM_STEPS / (high - low))) - (LARGEST_CODE + 1)
    return torch.cat([codes, steps], dim=-3).to(torch.int8), scales


def fast_round(values: Tensor) -> Tensor:
    """Round float32 values below 2^22 to the nearest integer, ties to even.

    `torch.round` splits tensors of 4,096 elements or more among threads, which then wait for each other for up to a
    millisecond to do 1 us of work.
    """
    return values + ROUNDING_OFFSET - ROUNDING_OFFSET


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """Invert `quantise`: return float32 values with the codes' shape and device."""
    import torch

    channels = scales.shape[-1]
    means, steps = codes.float().split([channels, codes.shape[-3] - channels], dim=-3)
    low, high = LOG_VARIANCE_RANGE
    log_variances = (steps + (LARGEST_CODE + 1)) * ((high - low) / NUM_STEPS) + low
    return torch.cat([means * scales[..., None, None], log_variances], dim=-3)


def pack(tower: ImageTower, latents: Iterable[Tensor]) -> Iterator[dict[str, np.ndarray]]:
    """Convert each image's float latents, (planes, h, w) in CPU memory, to the columns of its sample."""
    if tower.storage == "float16":
        yield from ({"image_latents": picture.half().numpy()} for picture in latents)
        return
    rows = (picture[None] for picture in latents)
    for codes, scales in quantise_in_chunks(partial(quantise, channels=tower.channels), rows):
        yield {"image_latents": codes[0], "image_scales": scales[0]}


def unpack(latents: Tensor, scales: Tensor | None) -> Tensor:
    """Decode stored latents (…, planes, h, w) to float32. `scales` is None unless the latents are quantised."""
    return latents.float() if scales is None else dequantise(latents, scales)


def draw(moments: Tensor, noise: Tensor) -> Tensor:
    """Sample latents (…, C, h, w) from moments (…, 2C, h, w), given standard normal noise (…, C, h, w): mean + σ·noise,
    as in diffusers' DiagonalGaussianDistribution."""
    mean, log_variance = moments.chunk(2, dim=-3)
    return mean + (0.5 * log_variance.clamp(*LOG_VARIANCE_RANGE)).exp() * noise


def columns(tower: ImageTower, bucket: Bucket) -> dict[str, str]:
    """Return the MDS column types of `pack`'s output."""
    height, width = bucket.latent_hw(tower.downsampling)
    types = {"image_latents": f"ndarray:{tower.storage}:{tower.num_planes},{height},{width}"}
    return types | ({"image_scales": f"ndarray:float32:{tower.channels}"} if tower.storage == "int8" else {})


def pack_features(name: str, tower: FeatureTower, features: Iterable[Tensor]) -> Iterator[dict[str, np.ndarray]]:
    """Convert each image's float features, (tokens, width) in CPU memory, to the columns of its sample."""
    for arrays in encode_states(features, tower.storage):
        yield dict(zip((f"features.{name}", f"feature_scales.{name}"), arrays, strict=False))


def feature_columns(name: str, tower: FeatureTower, bucket: Bucket) -> dict[str, str]:
    """Return the MDS column types of `pack_features`' output. Raises ValueError if the bucket, resized for the tower,
    is not a whole number of patches."""
    height, width = tower.grid(bucket)
    tokens, dtype = height * width, "float16" if tower.storage == "float16" else "uint8"
    types = {f"features.{name}": f"ndarray:{dtype}:{tokens},{tower.width}"}
    return types | ({f"feature_scales.{name}": f"ndarray:float16:{tokens}"} if tower.storage == "float8" else {})
