"""How much arithmetic one image, caption or step is, counted on the meta device: no weights, no GPU, no data."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plan.config import Networks
from shards.base.errors import RequestError
from shards.format.buckets import Bucket
from train.model.flops import TRAIN_OVER_FORWARD, count_flops


@dataclass(frozen=True)
class Work:
    """FLOPs by torch's counter, one multiply-add being 2, and sizes."""

    num_parameters: int
    """Of the U-Net."""
    train: dict[str, int]
    """Bucket → FLOPs of one image's training step."""
    encode: dict[str, int]
    """Bucket → FLOPs of one picture's VAE encoding."""
    caption: int
    """FLOPs of one caption's text encoding."""
    latent_hw: dict[str, tuple[int, int]]
    latent_channels: int
    text_length: int
    text_width: int


def count_work(networks: Networks, buckets: Iterable[str]) -> Work:
    """Build the three networks without weights and count one image of each bucket through them.

    Raises:
        RequestError: a config file is missing or is no JSON, the U-Net's text width is not the text encoder's, or a
            bucket does not suit the VAE.
    """
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    text_config = CLIPTextConfig(**_read_json(networks.text_encoder))
    length, width = text_config.max_position_embeddings, text_config.hidden_size
    with torch.device("meta"), torch.no_grad():
        unet = UNet2DConditionModel.from_config(_read_json(networks.unet))
        vae = AutoencoderKL.from_config(_read_json(networks.vae))
        text_encoder = CLIPTextModel(text_config)
        if unet.config.cross_attention_dim != width:
            raise RequestError(
                f"The U-Net ({networks.unet}) takes text latents of width {unet.config.cross_attention_dim}, and the "
                f"text encoder ({networks.text_encoder}) gives {width}. Choose two that fit."
            )
        channels = vae.config.latent_channels
        shapes = {name: _latent_hw(name, 2 ** (len(vae.config.block_out_channels) - 1)) for name in buckets}
        pictures = {name: (Bucket.parse(name).height, Bucket.parse(name).width) for name in shapes}
        text = torch.empty(1, length, width)
        return Work(
            num_parameters=sum(parameter.numel() for parameter in unet.parameters()),
            train={
                name: TRAIN_OVER_FORWARD * count_flops(unet, torch.empty(1, channels, *hw), torch.empty(1), text)
                for name, hw in shapes.items()
            },
            encode={name: count_flops(vae.encode, torch.empty(1, 3, *hw)) for name, hw in pictures.items()},
            caption=count_flops(text_encoder, torch.empty(1, length, dtype=torch.long)),
            latent_hw=shapes,
            latent_channels=channels,
            text_length=length,
            text_width=width,
        )


def _latent_hw(bucket: str, downsampling: int) -> tuple[int, int]:
    try:
        return Bucket.parse(bucket).latent_hw(downsampling)
    except ValueError as error:
        raise RequestError(f"{error}. Choose another bucket or another VAE.") from None


def _read_json(path: str) -> dict[str, Any]:
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise RequestError(
            f"There is no network config {path}. Give the config.json of a diffusers or transformers model "
            f"in `networks`."
        ) from None
    except (OSError, ValueError) as error:
        raise RequestError(f"The network config {path} cannot be read as JSON: {error}.") from None
