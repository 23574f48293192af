"""The two frozen encoders: pictures → posterior moments, captions → text latents.

Every batch is filled up to one size: kernels are chosen by shape, and so a sample's latents do not depend on how many
others happened to share its batch.

Encoding is in two halves, so that the device never waits for the worker: `start` hands a batch over and comes back at
once; calling what it returned waits for the latents. On a CPU, `start` does all of it.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer

from shards.base.config import Config
from shards.format.text import TextStorage

Item = TypeVar("Item")
Model = TypeVar("Model", bound=nn.Module)
Precision = Literal["float32", "float16", "bfloat16"]


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Mixed precision as configured; float32 turns it off."""
    dtype = getattr(torch, precision)
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "float32")


def lowered(model: Model, precision: Precision) -> Model:
    """A copy whose products hold their weights in `precision`: what autocast would make of them anew for each batch."""
    if precision == "float32":
        return model
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.to(getattr(torch, precision))
    return model


def filled(items: list[Item], batch_size: int) -> list[Item]:
    """`items` and as many copies of the last one as make up `batch_size`."""
    return items + items[-1:] * (batch_size - len(items))


def filled_rows(rows: Tensor, batch_size: int) -> Tensor:
    """The same for the rows of a tensor."""
    return torch.cat([rows, rows[-1:].expand(batch_size - len(rows), *rows.shape[1:])])


class Copies:
    """Copies to and from a GPU that run beside its arithmetic: a stream each way, and page-locked memory at this end.

    The allocators see to it that no buffer is handed out again while a stream still uses it: the host's knows which
    streams copy, the device's is told by `record_stream`. On the CPU there is nothing to copy.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.is_cuda = device.type == "cuda"
        if self.is_cuda:
            self.inward, self.outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory that `to_device` can copy from without stopping this thread."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.is_cuda)

    def to_device(self, host: Tensor) -> Tensor:
        """Begin to copy `host`; what this thread launches next waits for it on the device."""
        if not self.is_cuda:
            return host
        arithmetic = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.inward):
            copied = host.to(self.device, non_blocking=True)
        arithmetic.wait_stream(self.inward)
        copied.record_stream(arithmetic)
        return copied

    def to_host(self, *results: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Begin to copy `results` once what was launched so far is done; the function returned waits for them."""
        if not self.is_cuda:
            return lambda: results
        self.outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.outward):
            copies = tuple(self.buffer(tuple(result.shape), result.dtype) for result in results)
            for result, copied in zip(results, copies, strict=True):
                copied.copy_(result, non_blocking=True)
                result.record_stream(self.outward)
            done = torch.cuda.Event(blocking=True)  # or the wait would take a core from the decoders
            done.record()

        def wait() -> tuple[Tensor, ...]:
            done.synchronize()
            return copies

        return wait


class Stored:
    """Latents on their way back, as float16, which is what is stored.

    A row that overflows float16 is encoded again in float32; it may still overflow.
    """

    def __init__(self, latents: Tensor, copies: Copies, again: Callable[[Tensor], Tensor] | None):
        """`again`: boolean rows → their latents in float32, and more that fill the batch; none where they were float32
        to begin with."""
        halves = latents.half()
        # the sum is finite exactly if every term is: float32 holds millions of the largest float16
        self.wait = copies.to_host(halves, halves.flatten(1).sum(dim=1, dtype=torch.float32).isfinite())
        self.again = again

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """Wait; (N, …) float16 on the CPU."""
        halves, finite = self.wait()
        if self.again is not None and not finite.all():
            halves[~finite] = self.again(~finite)[: int((~finite).sum())].half().cpu()
        return halves


class ImageEncoder:
    """A diffusers AutoencoderKL folder, as a function from pixels to posterior moments."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        precision: Precision,
        posterior: Literal["moments", "mean"],
        compiled: bool = False,
    ):
        # float32 whatever the file holds: autocast lowers what may be lowered
        vae = AutoencoderKL.from_pretrained(folder, use_safetensors=True, torch_dtype=torch.float32)
        self.vae = vae.eval().requires_grad_(False).to(device, memory_format=torch.channels_last)
        self.lowered = lowered(self.vae, precision)
        if compiled:  # for each bucket's shape; what is encoded again in float32 is not worth compiling for
            self.lowered.encoder = torch.compile(self.lowered.encoder, dynamic=False)
        self.copies = Copies(device)
        self.device = device
        self.precision = precision
        self.posterior = posterior

    def __call__(self, pictures: list[np.ndarray], batch_size: int) -> Tensor:
        """N pictures (H, W, 3) uint8 → (N, planes, h, w) float16 on the CPU."""
        return self.start(pictures, batch_size)()

    @torch.inference_mode()
    def start(self, pictures: list[np.ndarray], batch_size: int) -> Callable[[], Tensor]:
        """Begin with N pictures; the function returned waits for what `__call__` returns."""
        pixels = self.copies.buffer((batch_size, *pictures[0].shape), torch.uint8)
        batch: list[np.ndarray] = filled(pictures, batch_size)
        np.stack(batch, out=pixels.numpy())
        moments = self._encode(self.copies.to_device(pixels), self.precision)[: len(pictures)]

        def again(rows: Tensor) -> Tensor:
            return self._encode(filled_rows(pixels[: len(pictures)][rows], batch_size).to(self.device), "float32")

        return Stored(moments, self.copies, again if self.precision != "float32" else None)

    def _encode(self, pixels: Tensor, precision: Precision) -> Tensor:
        # (N, H, W, 3) uint8 => (N, 3, H, W) in [-1, 1], which is channels_last as it lies
        scaled = pixels.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
        vae = self.lowered if precision == self.precision else self.vae
        with autocast(self.device, precision):
            moments = vae.encode(scaled).latent_dist.parameters.float()
        return moments if self.posterior == "moments" else moments.chunk(2, dim=1)[0]


@dataclass(frozen=True)
class EncodedCaption:
    """A caption's text latents (tokens, width) float16 on the CPU, its real tokens, and whether it was cut to fit."""

    latents: Tensor
    num_tokens: int
    truncated: bool


class TextConfig(Config):
    """How text latents are stored."""

    storage: TextStorage = "float16"
    """`float16` is exact; `float8` halves the bytes at 2.6 % relative error."""
    trim: bool = False
    """Store the real tokens alone; the U-Net then gets a cross-attention mask."""


class TextEncoder:
    """A transformers CLIP text model and its tokenizer, as a function from captions to last hidden states."""

    def __init__(
        self,
        folder: Path,
        tokenizer_folder: Path,
        device: torch.device,
        precision: Precision,
        compiled: bool = False,
    ):
        self.tokenizer = CLIPTokenizer.from_pretrained(tokenizer_folder)
        model = CLIPTextModel.from_pretrained(folder, use_safetensors=True, attn_implementation="sdpa")
        self.model = model.to(device, torch.float32).eval().requires_grad_(False)
        self.lowered = lowered(self.model, precision)
        if compiled:
            self.lowered = torch.compile(self.lowered, dynamic=False)
        self.copies = Copies(device)
        self.length: int = model.config.max_position_embeddings
        self.device = device
        self.precision = precision

    def __call__(self, captions: list[str], batch_size: int) -> list[EncodedCaption]:
        """Captions → one `EncodedCaption` each, padded to the model's length as diffusers' pipelines pad prompts."""
        return self.start(captions, batch_size)()

    @torch.inference_mode()
    def start(self, captions: list[str], batch_size: int) -> Callable[[], list[EncodedCaption]]:
        """Begin with N captions; the function returned waits for what `__call__` returns."""
        tokens = self.tokenizer(captions, verbose=False).input_ids
        ids = self.copies.buffer((batch_size, self.length), torch.long)
        ids.copy_(torch.tensor(filled([self._fitted(row) for row in tokens], batch_size)))
        states = self._encode(self.copies.to_device(ids), self.precision)[: len(captions)]

        def again(rows: Tensor) -> Tensor:
            return self._encode(filled_rows(ids[: len(captions)][rows], batch_size).to(self.device), "float32")

        stored = Stored(states, self.copies, again if self.precision != "float32" else None)
        return lambda: [
            EncodedCaption(latents, min(len(row), self.length), len(row) > self.length)
            for latents, row in zip(stored(), tokens, strict=True)
        ]

    def _fitted(self, tokens: list[int]) -> list[int]:
        """Cut before the end token, or padded, to the model's length: as the tokenizer does it on request."""
        if len(tokens) > self.length:
            return [*tokens[: self.length - 1], tokens[-1]]
        return tokens + [self.tokenizer.pad_token_id] * (self.length - len(tokens))

    def _encode(self, ids: Tensor, precision: Precision) -> Tensor:
        model = self.lowered if precision == self.precision else self.model
        with autocast(self.device, precision):
            return model(ids).last_hidden_state.float()
