"""The three kinds of towers: pictures → image latents, captions → text latents, pictures → features."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from diffusers.models.attention_processor import Attention, AttnProcessor
from torch import Tensor, nn

from precompute.encode.networks import Network, Site, filled, model_class, quantised, vision_options
from shards.base.device import is_accelerator
from shards.format.buckets import Bucket
from shards.format.text import TextLatents
from shards.format.towers import FeatureTower, ImageTower, TextTower

WIDEST_FUSED_HEAD = 256
"""Channels of a head that flash attention and cuDNN take at most."""


class ImageEncoder(Network):
    """A diffusers autoencoder, as a function from pixels to what is stored of its latents."""

    def __init__(self, folder: Path, tower: ImageTower, site: Site):
        # float32 whatever the file holds: autocast lowers what may be lowered
        load = getattr(diffusers, tower.class_name).from_pretrained
        vae = load(folder, use_safetensors=True, torch_dtype=torch.float32).to(memory_format=torch.channels_last)
        if attends_by_products(site.device):
            attend_by_products(vae)
        super().__init__(vae, self.encode, site, "encoder")
        self.tower = tower

    def encode(self, vae: nn.Module, pixels: Tensor) -> tuple[Tensor]:
        """(N, H, W, 3) uint8 → (N, planes, h, w)."""
        # which as (N, 3, H, W) in [-1, 1] is channels_last as it lies
        scaled = pixels.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
        encoded: Any = vae.encode(scaled)  # type: ignore[operator]
        if self.tower.posterior == "deterministic":
            return (encoded.latent,)
        moments = encoded.latent_dist.parameters
        return (moments if self.tower.posterior == "moments" else moments.chunk(2, dim=1)[0],)

    def start_batch(self, pixels: Tensor, count: int) -> Callable[[], Tensor]:
        """Begin with a full batch, (N, H, W, 3) uint8 on the host, whose first `count` count; the function returned
        waits for their (count, planes, h, w) float16 on the CPU."""
        wait = self.start((pixels,), count)
        return lambda: wait()[0]

    def __call__(self, pictures: list[np.ndarray], batch_size: int) -> Tensor:
        """N pictures (H, W, 3) uint8 → (N, planes, h, w) float16 on the CPU."""
        return self.start_batch(self.stack(pictures, batch_size), len(pictures))()


def attends_by_products(device: torch.device) -> bool:
    """Whether wide heads attend by plain products there: on a GPU. A CPU's fused kernel takes any width."""
    return is_accelerator(device)


def attend_by_products(model: nn.Module) -> None:
    """Have attention whose heads are too wide for a GPU's fast kernels, as in the middle of a VAE, be plain products.

    They differ from the fused kernel by rounding.
    """
    for module in model.modules():
        if isinstance(module, Attention) and module.inner_dim // module.heads > WIDEST_FUSED_HEAD:
            module.set_processor(AttnProcessor())


@dataclass(frozen=True)
class EncodedCaption:
    """What one text tower made of a caption, and whether it was cut to fit."""

    latents: TextLatents
    truncated: bool


class TextEncoder(Network):
    """A transformers text model and its tokenizer, as a function from captions to text latents."""

    def __init__(self, folder: Path, tokenizer_folder: Path, tower: TextTower, site: Site):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
        load = model_class(tower.class_name).from_pretrained
        model = load(folder, use_safetensors=True).to(torch.float32)  # with torch's fused attention, where it has it
        if tower.quantised:
            model = quantised(model, tower.quantised)
        super().__init__(model, self.encode, site)
        self.tower = tower
        self.kept = torch.tensor(tower.kept)

    def encode(self, model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """(N, max_tokens) ids, and which of them are real → hidden states and pooled output, as far as stored."""
        by_layer = self.tower.layer != "last"
        outputs = model(ids, attention_mask=mask, output_hidden_states=by_layer)
        results = []
        if self.tower.states:
            states = outputs.hidden_states[self.tower.layer] if by_layer else outputs.last_hidden_state
            everything = len(self.kept) == ids.shape[1]
            results.append(states if everything else states[:, self.kept.to(states.device)])
        if self.tower.pooled:
            projected = getattr(outputs, "text_embeds", None)
            results.append(outputs.pooler_output if projected is None else projected)
        return tuple(results)

    def start_batch(self, captions: list[str], batch_size: int) -> Callable[[], list[EncodedCaption]]:
        """Begin with N captions; the function returned waits for what `__call__` returns."""
        ids, mask, truncated = self.tokenize(captions, batch_size)
        wait = self.start((ids, mask) if self.tower.masked else (ids,), len(captions))
        # of a caption that ends before the tokens that are kept, the first of these stands for it
        num_tokens = mask[: len(captions), self.kept].sum(dim=1).clamp(min=1).tolist()
        return lambda: [
            EncodedCaption(self._latents(row, number), cut)
            for *row, number, cut in zip(*wait(), num_tokens, truncated, strict=True)
        ]

    def __call__(self, captions: list[str], batch_size: int) -> list[EncodedCaption]:
        """Captions → one `EncodedCaption` each, padded to one length as diffusers' pipelines pad prompts."""
        return self.start_batch(captions, batch_size)()

    def tokenize(self, captions: list[str], batch_size: int) -> tuple[Tensor, Tensor, list[bool]]:
        """(batch_size, max_tokens) ids and which of them are real, on the host; and which captions were cut to fit."""
        texts = [self.tower.prompt(caption) for caption in captions]
        tokens = self.tokenizer(texts, verbose=False).input_ids
        fitted = [self._fitted(text, row) for text, row in zip(texts, tokens, strict=True)]
        ids = self.copies.buffer((batch_size, self.tower.max_tokens), torch.long).fill_(self.tokenizer.pad_token_id)
        mask = self.copies.buffer(tuple(ids.shape), torch.long).zero_()
        # rows of arrays take a list in a tenth of the time that rows of tensors do
        id_rows, mask_rows = ids.numpy(), mask.numpy()
        for i, row in enumerate(filled(fitted, batch_size)):
            id_rows[i, : len(row)] = row
            mask_rows[i, : len(row)] = 1
        return ids, mask, [len(row) > self.tower.max_tokens for row in tokens]

    def _fitted(self, text: str, tokens: list[int]) -> list[int]:
        """Cut to the tower's length as the tokenizer does it, where that is needed."""
        if len(tokens) <= self.tower.max_tokens:
            return tokens
        return self.tokenizer(text, truncation=True, max_length=self.tower.max_tokens).input_ids

    def _latents(self, results: Sequence[Tensor], num_tokens: int) -> TextLatents:
        results = list(results)
        states = results.pop(0) if self.tower.states else None
        return TextLatents(states, num_tokens, results.pop(0) if self.tower.pooled else None)


class FeatureEncoder(Network):
    """A transformers vision model, as a function from pixels to the last hidden states of its patches."""

    def __init__(self, folder: Path, tower: FeatureTower, site: Site):
        model = model_class(tower.class_name).from_pretrained(folder, use_safetensors=True)
        super().__init__(model.to(torch.float32), self.encode, site)
        self.tower = tower
        self.options = vision_options(model)

    def encode(self, model: nn.Module, pixels: Tensor) -> tuple[Tensor]:
        """(N, H, W, 3) uint8 → (N, tokens, width), those of class and register tokens left out."""
        height, width = self.tower.grid(Bucket(pixels.shape[2], pixels.shape[1]))
        size = (height * self.tower.patch, width * self.tower.patch)
        pictures = pixels.permute(0, 3, 1, 2).float().div_(255)
        scaled = F.interpolate(pictures, size, mode="bicubic", antialias=True).clamp_(0, 1)
        mean, std = (
            pixels.new_tensor(of, dtype=torch.float32)[:, None, None] for of in (self.tower.mean, self.tower.std)
        )
        states = model((scaled - mean) / std, **self.options).last_hidden_state
        return (states[:, -height * width :],)

    def start_batch(self, pixels: Tensor, count: int) -> Callable[[], Tensor]:
        """As `ImageEncoder.start_batch`: (count, tokens, width) float16."""
        wait = self.start((pixels,), count)
        return lambda: wait()[0]
