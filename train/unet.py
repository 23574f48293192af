"""The U-Net, from a diffusers config file or an earlier run, and the check that it fits the latents."""

import json
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel

from shards.errors import RequestError
from train.data import DataSpec


def build_unet(path: Path, seed: int) -> UNet2DConditionModel:
    """A U-Net with random weights that depend on `seed` alone, from a diffusers config.json.

    Raises:
        RequestError: no such file, or diffusers cannot build it.
    """
    fields = read_unet_config(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            unet = UNet2DConditionModel.from_config(fields)
        except (TypeError, ValueError) as error:
            raise RequestError(f"diffusers cannot build a U-Net from {path}: {error}") from error
    if unet.config.get("dropout"):
        raise RequestError(f"{path} sets dropout {unet.config.dropout}; its masks would depend on the number of ranks.")
    return unet


def read_unet_config(path: Path) -> dict[str, object]:
    """The JSON at `path`.

    Raises:
        RequestError: it is not there, or not JSON.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"The U-Net config {path} cannot be read: {error}. Give a diffusers config.json.") from error


def check_fit(unet: UNet2DConditionModel, spec: DataSpec) -> None:
    """Hold the U-Net's channels, widths and steps against the latents.

    Raises:
        RequestError: what differs, with both values.
    """
    config = unet.config
    wrong = []
    if (config.in_channels, config.out_channels) != (spec.latent_channels, spec.latent_channels):
        wrong.append(
            f"it maps {config.in_channels} to {config.out_channels} channels; latents have {spec.latent_channels}"
        )
    if config.cross_attention_dim != spec.text_width:
        wrong.append(f"it attends to states of width {config.cross_attention_dim}; text latents have {spec.text_width}")
    halvings = 2 ** (len(config.block_out_channels) - 1)
    for stream in spec.streams:
        if any(side % halvings for side in stream.latent_hw):
            wrong.append(
                f"it halves {halvings.bit_length() - 1} times; latents of {stream.config.bucket} are {stream.latent_hw}"
            )
    if wrong:
        raise RequestError(f"The U-Net does not fit the latents: {'; '.join(wrong)}. Give another `unet` or root.")
