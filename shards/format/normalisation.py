"""Scale and shift of an autoencoder's latents in diffusers' pipelines."""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from shards.base.errors import RequestError


def normalisation(config: Mapping[str, Any], channels: int, where: str) -> dict[str, tuple[float, ...]]:
    """Return the per-channel scale and shift that diffusers' pipelines use to normalise a VAE's latents. `config` is
    the config of the built VAE, in which missing fields have their defaults; `where` names it in error messages.

    Raises RequestError if the config has no valid scale, an incomplete per-channel normalisation, or two kinds of
    shift.
    """
    scale, shift = config.get("scaling_factor"), config.get("shift_factor")
    mean, std = config.get("latents_mean"), config.get("latents_std")
    remedy = "Use the config.json from the model's publisher."
    if not _is_number(scale) or scale <= 0:
        raise RequestError(
            f"{where} has scaling_factor {scale}, so the scale of the latents is unknown. scaling_factor must be a "
            f"number greater than 0. {remedy}"
        )
    if mean is None and std is None:
        if shift is not None and not _is_number(shift):
            raise RequestError(f"{where} has shift_factor {shift}, which is not a number. {remedy}")
        return {"scale": (float(scale),) * channels, "shift": (float(shift or 0),) * channels}
    if mean is None or std is None:
        present, missing = ("latents_std", "latents_mean") if mean is None else ("latents_mean", "latents_std")
        raise RequestError(f"{where} has {present} but no {missing}; pipelines need both for normalisation. {remedy}")
    if shift:
        raise RequestError(
            f"{where} has both shift_factor and latents_mean, and no diffusers pipeline applies both. {remedy}"
        )
    if len(mean) != channels or len(std) != channels or not all(map(_is_number, [*mean, *std])) or min(std) <= 0:
        raise RequestError(
            f"{where}: latents_mean and latents_std must have {channels} numbers each, one per channel, and those of "
            f"latents_std must be above 0. {remedy}"
        )
    # StableDiffusionXLImg2ImgPipeline.prepare_latents: (latents - mean) · scaling_factor / std
    return {"scale": tuple(float(scale) / float(value) for value in std), "shift": tuple(map(float, mean))}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
