"""One rank's share of a global batch: how it is stacked from samples, moved, and cut into microbatches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from shards.format.text import unpack
from train.data.draws import Draws, Purpose


@dataclass
class Batch:
    """One rank's share of a global batch, or a slice of it; tensors as stored."""

    keys: list[str]
    slots: Tensor
    """(N,) int64: places in the global batch."""
    image_latents: Tensor
    """(N, planes, h, w) float16."""
    text_latents: Tensor
    """(N, tokens, width) float16, or e4m3 codes as uint8; trimmed captions are padded with zeros. Where there
    is `num_captions`, this, `text_scales` and `num_tokens` hold all captions of the first sample, then of the next."""
    text_scales: Tensor | None
    """(N, tokens) float16, beside codes."""
    num_tokens: Tensor
    """(N,) int64: tokens stored."""
    num_captions: Tensor | None = None
    """(N,) int64, of a batch whose samples may have several; None where each has the one that it is trained with."""

    def __len__(self) -> int:
        return len(self.keys)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        moved = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if torch.is_tensor(value)
        }
        return Batch(**(vars(self) | moved))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory, from which `to` copies without waiting; called by the DataLoader."""
        pinned = {name: value.pin_memory() for name, value in vars(self).items() if torch.is_tensor(value)}
        return Batch(**(vars(self) | pinned))

    def draw_captions(self, draws: Draws) -> "Batch":
        """The batch with one caption per sample, each of its captions being as likely."""
        if self.num_captions is None:
            return self
        return self.with_captions(draws.integers(Purpose.CAPTION_CHOICE, self.num_captions))

    def with_captions(self, choice: Tensor) -> "Batch":
        """The batch with one caption per sample: its number `choice`, (N,) int64."""
        if self.num_captions is None:
            return self
        # captions of all samples => the chosen ones
        rows = self.num_captions.cumsum(0) - self.num_captions + choice
        chosen = replace(
            self,
            text_latents=self.text_latents[rows],
            text_scales=None if self.text_scales is None else self.text_scales[rows],
            num_tokens=self.num_tokens[rows],
            num_captions=None,
        )
        return chosen.pin_memory() if self.text_latents.is_pinned() else chosen

    def microbatches(self, size: int) -> Iterator["Batch"]:
        """Slices of at most `size` samples, in order; of a batch with one caption per sample."""
        assert self.num_captions is None
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            fields: dict[str, Any] = {k: v if v is None else v[part] for k, v in vars(self).items()}
            yield Batch(**fields)


@dataclass(frozen=True)
class Collate:
    """MDS samples → one `Batch`. A class, so that loader workers can be spawned as well as forked."""

    slots: Tensor
    text_length: int

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        """Stack one rank's share of a global batch."""
        captions = [unpack(sample) for sample in samples]
        several = any(sample["text_latents"].ndim == 3 for sample in samples)
        rows = [row for of_sample in captions for row in of_sample]
        scaled = "text_scales" in samples[0]
        return Batch(
            keys=[sample["key"] for sample in samples],
            slots=self.slots[: len(samples)],
            image_latents=_stack([sample["image_latents"] for sample in samples]),
            text_latents=_stack([row["text_latents"] for row in rows], self.text_length),
            text_scales=_stack([row["text_scales"] for row in rows], self.text_length) if scaled else None,
            num_tokens=torch.tensor([len(row["text_latents"]) for row in rows]),
            num_captions=torch.tensor([len(of_sample) for of_sample in captions]) if several else None,
        )


def _stack(arrays: list[np.ndarray], length: int | None = None) -> Tensor:
    """(N, *shape) of arrays of one shape; or, given a `length`, of (tokens, …) each, with zeros behind up to it."""
    first = arrays[0]
    shape = (len(arrays), *first.shape) if length is None else (len(arrays), length, *first.shape[1:])
    stacked = _empty(shape, first.dtype)
    rows = stacked.numpy()
    for row, array in zip(rows, arrays, strict=True):
        row[: len(array)] = array
        row[len(array) :] = 0
    return stacked


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
    """A tensor to be filled; in a loader process in memory that the training process sees too, so that it need not be
    copied on its way there."""
    tensor = torch.from_numpy(np.empty(0, dtype))
    if get_worker_info() is not None:
        storage = torch.empty(0, dtype=tensor.dtype).untyped_storage()._new_shared(math.prod(shape) * dtype.itemsize)
        return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, shape)  # type: ignore[call-overload]
    return torch.empty(shape, dtype=tensor.dtype)
