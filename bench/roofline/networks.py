"""Work of the trained network, set up as by the trainer, and of both encoders."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn

from bench.roofline.eager import operations
from bench.roofline.kernels import DeviceWork, add_up
from bench.roofline.lowering import fake_tensors, lowered
from bench.roofline.pretend import cudnn_layouts
from plan.config import Networks
from precompute.encode.encoders import attend_by_products
from precompute.encode.networks import lowered as with_weights_in
from shards.format.buckets import Bucket
from shards.format.towers import ONLY_TEXT
from train.model.channels_last import keep_channels_last
from train.model.memory import without_values
from train.model.network import build_network
from train.model.norms import use_low_precision_norms

TEXT_LENGTH, DOWNSAMPLING, ENCODED = 77, 8, 64


@dataclass(frozen=True)
class TrainingStep:
    """Forward and backward pass of a microbatch."""

    bucket: str
    microbatch_size: int
    compiled: bool = False
    low_precision_norms: bool = False

    @property
    def words(self) -> str:
        """Description of the step."""
        how = "compiled" if self.compiled else "eager"
        return f"{self.microbatch_size} at {self.bucket}, {how}{', low precision norms' * self.low_precision_norms}"

    def num_parameters(self, unet: Path) -> int:
        """Count the network's parameters."""
        return sum(weight.numel() for weight in _unet(unet).parameters())


@cache
def _unet(path: Path) -> Any:
    return build_network(path, None)


@cache
def training_work(path: Path, step: TrainingStep) -> DeviceWork:
    """Compute the work of a U-Net's training step in bfloat16 autocast."""
    unet = build_network(path, None)
    keep_channels_last(unet)
    if step.low_precision_norms:
        use_low_precision_norms(unet)
    size, hw = step.microbatch_size, Bucket.parse(step.bucket).latent_hw(DOWNSAMPLING)
    with fake_tensors():
        without_values(unet)
        latents = torch.empty(size, unet.config.in_channels, *hw)
        times = torch.zeros(size, dtype=torch.int64)
        text = torch.empty(size, TEXT_LENGTH, unet.config.cross_attention_dim)

        def call() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                (answer,) = unet(latents, timestep=times, encoder_hidden_states=text, return_dict=False)
                return answer.float()

        with cudnn_layouts():
            eager = operations(call, training=True)
        if not step.compiled:
            return add_up(size, eager.kernels, eager.flops)
        kernels, saved = lowered(unet, call, training=True)
    return add_up(size, kernels, eager.flops, saved)


def encoder_work(networks: Networks, buckets: Iterable[str]) -> dict[str, DeviceWork]:
    """Compute the work of the compiled encoders in bfloat16: bucket → autoencoder, and `text` → text encoder."""
    found = {}
    with torch.device("meta"):
        vae = diffusers.AutoencoderKL.from_config(json.loads(Path(networks.vae).read_text()))
        config = transformers.CLIPTextConfig(**json.loads(Path(networks.texts[ONLY_TEXT].config).read_text()))
        text_model = with_weights_in(transformers.CLIPTextModel(config), "bfloat16")
    vae.to(memory_format=torch.channels_last)
    attend_by_products(vae)
    vae = with_weights_in(vae, "bfloat16")
    with fake_tensors(), cudnn_layouts():
        for model in (vae, text_model):
            without_values(model)
        tokens = torch.zeros(ENCODED, TEXT_LENGTH, dtype=torch.int64)
        for bucket in buckets:
            parsed = Bucket.parse(bucket)
            pixels = torch.empty(ENCODED, 3, parsed.height, parsed.width)
            found[bucket] = _encoding(vae, lambda pixels=pixels: vae.encode(pixels).latent_dist.parameters)
        found["text"] = _encoding(text_model, lambda: text_model(tokens).last_hidden_state)
    return found


def _encoding(model: nn.Module, call: Any) -> DeviceWork:
    def autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call()

    flops = operations(autocast, training=False).flops
    kernels, _ = lowered(model, autocast, training=False)
    return add_up(ENCODED, kernels, flops)
