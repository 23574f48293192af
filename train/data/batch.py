"""One rank's share of a global batch: collated from samples, moved to the device, and split into microbatches."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shards.format.text import has_multiple_captions, kind_of, unpack
from train.data.draws import Draws, Purpose


@dataclass
class Batch:
    """One rank's share of a global batch, or a slice of that share."""

    keys: list[str]
    slots: Tensor
    """(N,) int64: each sample's position in the global batch."""
    columns: dict[str, Tensor]
    """Columns in their stored form: `image_latents` (N, planes, h, w), `size` (N, 4), `text_latents.NAME`
    (N, tokens, width) as float16 or as e4m3 codes with `text_scales.NAME` (N, tokens), `num_tokens.NAME` (N,),
    `pooled.NAME` (N, pooled), `features.NAME` (N, tokens, width). Trimmed captions are zero-padded. If `num_captions`
    is set, the text columns hold all captions of the first sample, followed by all captions of the second, and so
    on."""
    num_captions: Tensor | None = None
    """(N,) int64 number of captions per sample; None if each sample has exactly one caption."""

    def __len__(self) -> int:
        return len(self.keys)

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """Copy the batch to pinned memory, so that `to` can copy asynchronously."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply a function to every tensor in the batch."""
        return Batch(
            self.keys,
            change(self.slots),
            {name: change(tensor) for name, tensor in self.columns.items()},
            None if self.num_captions is None else change(self.num_captions),
        )

    def draw_captions(self, draws: Draws) -> "Batch":
        """Keep one caption per sample, chosen uniformly at random."""
        if self.num_captions is None:
            return self
        return self.with_captions(draws.integers(Purpose.CAPTION_CHOICE, self.num_captions))

    def with_captions(self, choice: Tensor) -> "Batch":
        """Keep one caption per sample. `choice`, (N,) int64, has the index of each sample's caption."""
        if self.num_captions is None:
            return self
        # captions of all samples => the chosen captions
        rows = self.num_captions.cumsum(0) - self.num_captions + choice
        columns = {name: tensor[rows] if kind_of(name) else tensor for name, tensor in self.columns.items()}
        chosen = replace(self, columns=columns, num_captions=None)
        return chosen.pin_memory() if self.slots.is_pinned() else chosen

    def take(self, rows: slice | Tensor) -> "Batch":
        """Select samples of a batch with one caption per sample. Their keys are kept only if `rows` is a slice."""
        assert self.num_captions is None
        keys = self.keys[rows] if isinstance(rows, slice) else [""] * len(rows)
        return Batch(keys, self.slots[rows], {name: tensor[rows] for name, tensor in self.columns.items()})


@dataclass(frozen=True)
class Collate:
    """Function that collates MDS samples into a `Batch`."""

    slots: Tensor
    lengths: dict[str, int | None]
    """Column to read → number of tokens in an untrimmed caption, or None for columns without a token axis."""
    shared: bool = False
    """Whether to collate into shared memory, so that a batch reaches another process without being copied."""

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        """Stack the samples of one rank's share of a global batch."""
        captions = [unpack(sample) for sample in samples]
        rows = [row for sample_captions in captions for row in sample_captions]
        columns = {
            name: _stack([row[name] for row in (rows if kind_of(name) else samples)], length, self.shared)
            for name, length in self.lengths.items()
        }
        num_captions = torch.tensor(list(map(len, captions)))
        return Batch(
            keys=[sample["key"] for sample in samples],
            slots=self.slots[: len(samples)],
            columns=columns,
            num_captions=num_captions if any(map(has_multiple_captions, samples)) else None,
        )


def _stack(arrays: list[np.ndarray], length: int | None, shared: bool) -> Tensor:
    """Stack arrays to (N, *shape). If `length` is given, arrays of (tokens, …) are zero-padded to it first."""
    first = arrays[0]
    shape = (len(arrays), *first.shape) if length is None else (len(arrays), length, *first.shape[1:])
    stacked = _empty(shape, first.dtype, shared)
    rows = stacked.numpy()
    for i, array in enumerate(arrays):
        if length is None:
            rows[i] = array
        else:
            rows[i, : len(array)] = array
            rows[i, len(array) :] = 0
    return stacked


def _empty(shape: tuple[int, ...], dtype: np.dtype, shared: bool) -> Tensor:
    """Allocate an uninitialized tensor, in shared memory if `shared`."""
    tensor = torch.from_numpy(np.empty(0, dtype))
    if shared:
        storage = tensor.untyped_storage()._new_shared(math.prod(shape) * dtype.itemsize)
        return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, shape)  # type: ignore[call-overload]
    return torch.empty(shape, dtype=tensor.dtype)
