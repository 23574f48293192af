"""The two frozen encoders: pictures → posterior moments, captions → text latents.

Every batch is filled up to one size: kernels are chosen by shape, and so a sample's latents do not depend on how many
others happened to share its batch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

Item = TypeVar("Item")
Precision = Literal["float32", "float16", "bfloat16"]


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Mixed precision as configured; float32 turns it off."""
    dtype = getattr(torch, precision)
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "float32")


def filled(items: list[Item], batch_size: int) -> list[Item]:
    """`items` and as many copies of the last one as make up `batch_size`."""
    return items + items[-1:] * (batch_size - len(items))


class ImageEncoder:
    """A diffusers AutoencoderKL folder, as a function from pixels to posterior moments."""

    def __init__(self, folder: Path, device: torch.device, precision: Precision, posterior: Literal["moments", "mean"]):
        vae = AutoencoderKL.from_pretrained(folder, use_safetensors=True).eval().requires_grad_(False)
        # float32 whatever the file holds: autocast lowers what may be lowered
        self.vae = vae.to(device, torch.float32).to(memory_format=torch.channels_last)
        self.device = device
        self.precision = precision
        self.posterior = posterior

    @torch.inference_mode()
    def __call__(self, pictures: list[np.ndarray], batch_size: int) -> Tensor:
        """N pictures (H, W, 3) uint8 → (N, planes, h, w) float32 on the CPU.

        A row that overflows float16, which is what is stored, is encoded again in float32; it may still overflow.
        """
        # uint8 => [-1, 1], on the device
        batch: list[np.ndarray] = filled(pictures, batch_size)
        pixels = torch.from_numpy(np.stack(batch)).to(self.device)
        pixels = pixels.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
        moments = self._encode(pixels, self.precision)[: len(pictures)]
        broken = ~moments.half().isfinite().flatten(1).all(dim=1)
        if self.precision != "float32" and broken.any():
            moments[broken] = self._encode(pixels[: len(pictures)][broken], "float32")
        return moments.cpu()

    def _encode(self, pixels: Tensor, precision: Precision) -> Tensor:
        with autocast(self.device, precision):
            moments = self.vae.encode(pixels).latent_dist.parameters.float()
        return moments if self.posterior == "moments" else moments.chunk(2, dim=1)[0]


@dataclass(frozen=True)
class EncodedCaption:
    """A caption's text latents (tokens, width) float32 on the CPU, its real tokens, and whether it was cut to fit."""

    latents: Tensor
    num_tokens: int
    truncated: bool


class TextEncoder:
    """A transformers CLIP text model and its tokenizer, as a function from captions to last hidden states."""

    def __init__(self, folder: Path, tokenizer_folder: Path, device: torch.device, precision: Precision):
        self.tokenizer = CLIPTokenizer.from_pretrained(tokenizer_folder)
        model = CLIPTextModel.from_pretrained(folder, use_safetensors=True)
        self.model = model.to(device, torch.float32).eval().requires_grad_(False)
        self.length: int = model.config.max_position_embeddings
        self.device = device
        self.precision = precision

    @torch.inference_mode()
    def __call__(self, captions: list[str], batch_size: int) -> list[EncodedCaption]:
        """Captions → one `EncodedCaption` each, padded to the model's length as diffusers' pipelines pad prompts."""
        num_tokens = [len(ids) for ids in self.tokenizer(captions, verbose=False).input_ids]
        ids = self.tokenizer(
            filled(captions, batch_size),
            padding="max_length",
            max_length=self.length,
            truncation=True,
            return_tensors="pt",
        ).input_ids.to(self.device)
        latents = self._encode(ids, self.precision)[: len(captions)]
        broken = ~latents.half().isfinite().flatten(1).all(dim=1)
        if self.precision != "float32" and broken.any():
            latents[broken] = self._encode(ids[: len(captions)][broken], "float32")
        return [
            EncodedCaption(row, min(count, self.length), count > self.length)
            for row, count in zip(latents.cpu(), num_tokens, strict=True)
        ]

    def _encode(self, ids: Tensor, precision: Precision) -> Tensor:
        with autocast(self.device, precision):
            return self.model(ids).last_hidden_state.float()
