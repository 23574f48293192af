"""The three kinds of encoders: images → image latents, captions → text latents, images → features."""

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

from precompute.encode.networks import DeviceSettings, Network, model_class, pad, vision_options
from precompute.encode.quantised import check_float8, quantise
from shards.base.device import is_accelerator
from shards.format.buckets import Bucket
from shards.format.projection import matrix_of, project
from shards.format.text import TextLatents
from shards.format.towers import FeatureTower, ImageTower, TextTower

MAX_FUSED_HEAD = 256
"""Maximum number of channels per head that flash attention and cuDNN support."""


class PictureNetwork(Network):
    """A network that turns each image into one tensor."""

    def stack(self, pictures: list[np.ndarray], batch_size: int) -> Tensor:
        """Stack images (H, W, 3) uint8 into a full batch (batch_size, H, W, 3) in host memory."""
        pixels = self.copies.buffer((batch_size, *pictures[0].shape), torch.uint8)
        batch: list[np.ndarray] = pad(pictures, batch_size)
        np.stack(batch, out=pixels.numpy())
        return pixels

    def start_batch(self, pixels: Tensor, count: int) -> Callable[[], Tensor]:
        """Start encoding a full batch, (N, H, W, 3) uint8 in host memory; images after the first `count` are padding.
        The returned function waits for the results, (count, …) float16 on the CPU."""
        wait = self.start((pixels,), count)
        return lambda: wait()[0]


class ImageEncoder(PictureNetwork):
    """A diffusers autoencoder, which turns pixels into the latents to store."""

    def __init__(self, folder: Path, tower: ImageTower, settings: DeviceSettings):
        # load in float32 whatever the file's data type, because autocast lowers the precision where that is safe
        load = getattr(diffusers, tower.class_name).from_pretrained
        vae = load(folder, use_safetensors=True, torch_dtype=torch.float32).to(memory_format=torch.channels_last)
        if is_accelerator(settings.device):
            attend_by_products(vae)
        super().__init__(vae, self.encode, settings, "encoder")
        self.tower = tower

    def encode(self, vae: nn.Module, pixels: Tensor) -> tuple[Tensor]:
        """Encode (N, H, W, 3) uint8 pixels into (N, planes, h, w) latents."""
        # (N, 3, H, W) in [-1, 1]; the permuted memory is channels_last already
        scaled = pixels.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
        encoded: Any = vae.encode(scaled)  # type: ignore[operator]
        if self.tower.posterior == "deterministic":
            return (encoded.latent,)
        moments = encoded.latent_dist.parameters
        return (moments if self.tower.posterior == "moments" else moments.chunk(2, dim=1)[0],)

    def __call__(self, pictures: list[np.ndarray], batch_size: int) -> Tensor:
        """Encode N images (H, W, 3) uint8 into (N, planes, h, w) float16 on the CPU."""
        return self.start_batch(self.stack(pictures, batch_size), len(pictures))()


def attend_by_products(model: nn.Module) -> None:
    """Use plain matrix products for attention layers whose heads are too wide for a GPU's fused kernels, such as those
    in a VAE's mid block. Results differ only by rounding."""
    for module in model.modules():
        if isinstance(module, Attention) and module.inner_dim // module.heads > MAX_FUSED_HEAD:
            module.set_processor(AttnProcessor())


@dataclass(frozen=True)
class TowerCaption:
    """A caption's latents from one text tower."""

    latents: TextLatents
    truncated: bool
    """Whether the caption was longer than the tower's maximum."""


class TextEncoder(Network):
    """A transformers text model and its tokenizer, which turn captions into text latents."""

    def __init__(self, folder: Path, tokenizer_folder: Path, tower: TextTower, settings: DeviceSettings):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
        load = model_class(tower.class_name).from_pretrained
        encoder = getattr(transformers.AutoConfig.from_pretrained(folder), "encoder", None)
        # of a model with a decoder; transformers before version 5 does not choose the encoder's config itself
        own = {} if encoder is None else {"config": encoder}
        # float32 whatever config.json says, because encoding.json ignores its data type
        model = load(folder, use_safetensors=True, dtype=torch.float32, **own)
        if tower.quantised == "float8":
            check_float8(settings.device)
        if tower.quantised:
            model = quantise(model, tower.quantised)
        super().__init__(model, self.encode, settings)
        self.tower = tower
        self.kept = torch.tensor(tower.kept)
        self.matrix = matrix_of(tower.projection).to(settings.device) if tower.projection else None

    def encode(self, model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Encode token ids (N, max_tokens), with a mask of the real tokens, into the outputs that are stored: hidden
        states, pooled output or both."""
        by_layer = self.tower.layer != "last"
        outputs = model(ids, attention_mask=mask, output_hidden_states=by_layer)
        results = []
        if self.tower.states:
            states = outputs.hidden_states[self.tower.layer] if by_layer else outputs.last_hidden_state
            keeps_all = len(self.kept) == ids.shape[1]
            states = states if keeps_all else states[:, self.kept.to(states.device)]
            results.append(states if self.matrix is None else project(states, self.matrix))
        if self.tower.pooled:
            projected = getattr(outputs, "text_embeds", None)
            results.append(outputs.pooler_output if projected is None else projected)
        return tuple(results)

    def start_batch(self, captions: list[str], batch_size: int) -> Callable[[], list[TowerCaption]]:
        """Start encoding captions. The returned function waits for their latents, and returns what `__call__` would."""
        ids, mask, truncated = self.tokenize(captions, batch_size)
        wait = self.start((ids, mask) if self.tower.masked else (ids,), len(captions))
        # a caption that ends before the first kept position is represented by the token at that position
        num_tokens = mask[: len(captions), self.kept].sum(dim=1).clamp(min=1).tolist()
        return lambda: [
            TowerCaption(self._latents(row, number), was_truncated)
            for *row, number, was_truncated in zip(*wait(), num_tokens, truncated, strict=True)
        ]

    def __call__(self, captions: list[str], batch_size: int) -> list[TowerCaption]:
        """Encode captions, padded to a fixed length as in diffusers' pipelines."""
        return self.start_batch(captions, batch_size)()

    def tokenize(self, captions: list[str], batch_size: int) -> tuple[Tensor, Tensor, list[bool]]:
        """Tokenize captions into a full batch of ids (batch_size, max_tokens) and the mask of real tokens, in host
        memory. Also return which captions were truncated."""
        texts = [self.tower.prompt(caption) for caption in captions]
        tokens = self.tokenizer(texts, verbose=False).input_ids
        fitted = [self._fitted(text, row) for text, row in zip(texts, tokens, strict=True)]
        ids = self.copies.buffer((batch_size, self.tower.max_tokens), torch.long).fill_(self.tokenizer.pad_token_id)
        mask = self.copies.buffer(tuple(ids.shape), torch.long).zero_()
        # assigning a list to a row is ten times as fast in a NumPy array as in a tensor
        id_rows, mask_rows = ids.numpy(), mask.numpy()
        for i, row in enumerate(pad(fitted, batch_size)):
            id_rows[i, : len(row)] = row
            mask_rows[i, : len(row)] = 1
        return ids, mask, [len(row) > self.tower.max_tokens for row in tokens]

    def _fitted(self, text: str, tokens: list[int]) -> list[int]:
        """Truncate the tokens to the tower's maximum number, if necessary, by the tokenizer's own rules."""
        if len(tokens) <= self.tower.max_tokens:
            return tokens
        return self.tokenizer(text, truncation=True, max_length=self.tower.max_tokens).input_ids

    def _latents(self, results: Sequence[Tensor], num_tokens: int) -> TextLatents:
        results = list(results)
        states = results.pop(0) if self.tower.states else None
        return TextLatents(states, num_tokens, results.pop(0) if self.tower.pooled else None)


class FeatureEncoder(PictureNetwork):
    """A transformers vision model, which turns pixels into the last hidden states of its patches."""

    def __init__(self, folder: Path, tower: FeatureTower, settings: DeviceSettings):
        load = model_class(tower.class_name).from_pretrained
        model = load(folder, use_safetensors=True, dtype=torch.float32)
        super().__init__(model, self.encode, settings)
        self.tower = tower
        self.options = vision_options(model)

    def encode(self, model: nn.Module, pixels: Tensor) -> tuple[Tensor]:
        """Encode (N, H, W, 3) uint8 pixels into (N, tokens, width) features, without class and register tokens."""
        height, width = self.tower.grid(Bucket(pixels.shape[2], pixels.shape[1]))
        size = (height * self.tower.patch, width * self.tower.patch)
        pictures = pixels.permute(0, 3, 1, 2).float().div_(255)
        scaled = F.interpolate(pictures, size, mode="bicubic", antialias=True).clamp_(0, 1)
        mean, std = (
            pixels.new_tensor(of, dtype=torch.float32)[:, None, None] for of in (self.tower.mean, self.tower.std)
        )
        states = model((scaled - mean) / std, **self.options).last_hidden_state
        return (states[:, -height * width :],)
