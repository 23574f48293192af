"""One rank's share of a global batch: how it is stacked from samples, moved, and cut into microbatches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info


@dataclass
class Batch:
    """One rank's share of a global batch, or a slice of it; tensors as stored."""

    keys: list[str]
    slots: Tensor
    """(N,) int64: places in the global batch."""
    image_latents: Tensor
    """(N, planes, h, w) float16."""
    text_latents: Tensor
    """(N, tokens, width) float16, or e4m3 codes as uint8; trimmed captions are padded with zeros."""
    text_scales: Tensor | None
    """(N, tokens) float16, beside codes."""
    num_tokens: Tensor
    """(N,) int64: tokens stored."""

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

    def microbatches(self, size: int) -> Iterator["Batch"]:
        """Slices of at most `size` samples, in order."""
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
        scaled = "text_scales" in samples[0]
        return Batch(
            keys=[sample["key"] for sample in samples],
            slots=self.slots[: len(samples)],
            image_latents=_stack([sample["image_latents"] for sample in samples]),
            text_latents=_stack([self._pad(sample["text_latents"]) for sample in samples]),
            text_scales=_stack([self._pad(sample["text_scales"]) for sample in samples]) if scaled else None,
            num_tokens=torch.tensor([len(sample["text_latents"]) for sample in samples]),
        )

    def _pad(self, array: np.ndarray) -> np.ndarray:
        return np.pad(array, [(0, self.text_length - len(array)), *[(0, 0)] * (array.ndim - 1)])


def _stack(arrays: list[np.ndarray]) -> Tensor:
    shape = (len(arrays), *arrays[0].shape)
    dtype = torch.from_numpy(np.empty(0, arrays[0].dtype)).dtype
    stacked = torch.empty(0, dtype=dtype)
    if get_worker_info() is not None:  # in memory that the training process sees too, so that nothing is copied there
        storage = stacked.untyped_storage()._new_shared(math.prod(shape) * dtype.itemsize)
        stacked = torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload]
    stacked = stacked.resize_(shape)
    np.stack(arrays, out=stacked.numpy())
    return stacked
