"""One rank's share of a global batch: how it is stacked from samples, moved, and cut into microbatches."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from shards.format.text import has_multiple_captions, kind_of, unpack
from train.data.draws import Draws, Purpose


@dataclass
class Batch:
    """One rank's share of a global batch, or a slice of it."""

    keys: list[str]
    slots: Tensor
    """(N,) int64: places in the global batch."""
    columns: dict[str, Tensor]
    """As stored, by the names of version 2: `image_latents` (N, planes, h, w), `size` (N, 4), `text_latents.NAME`
    (N, tokens, width) as float16 or e4m3 codes, `text_scales.NAME` (N, tokens) beside codes, `num_tokens.NAME` (N,),
    `pooled.NAME` (N, pooled), `features.NAME` (N, tokens, width). Trimmed captions are padded with zeros. Where
    there is `num_captions`, text columns hold all captions of the first sample, then of the next."""
    num_captions: Tensor | None = None
    """(N,) int64, of a batch whose samples may have several; None where each has the one that it is trained with."""

    def __len__(self) -> int:
        return len(self.keys)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory, from which `to` copies without waiting; called by the DataLoader."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(
            self.keys,
            change(self.slots),
            {name: change(tensor) for name, tensor in self.columns.items()},
            None if self.num_captions is None else change(self.num_captions),
        )

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
        columns = {name: tensor[rows] if kind_of(name) else tensor for name, tensor in self.columns.items()}
        chosen = replace(self, columns=columns, num_captions=None)
        return chosen.pin_memory() if self.slots.is_pinned() else chosen

    def take(self, rows: slice | Tensor) -> "Batch":
        """Those samples of a batch with one caption per sample; keys where `rows` is a slice."""
        assert self.num_captions is None
        keys = self.keys[rows] if isinstance(rows, slice) else [""] * len(rows)
        return Batch(keys, self.slots[rows], {name: tensor[rows] for name, tensor in self.columns.items()})


@dataclass(frozen=True)
class Collate:
    """MDS samples → one `Batch`. A class, so that loader workers can be spawned as well as forked."""

    slots: Tensor
    lengths: dict[str, int | None]
    """The columns to read: those of tokens → how many tokens an untrimmed caption has; others → None."""

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        """Stack one rank's share of a global batch."""
        captions = [unpack(sample) for sample in samples]
        rows = [row for of_sample in captions for row in of_sample]
        columns = {
            name: _stack([row[name] for row in (rows if kind_of(name) else samples)], length)
            for name, length in self.lengths.items()
        }
        num_captions = torch.tensor(list(map(len, captions)))
        return Batch(
            keys=[sample["key"] for sample in samples],
            slots=self.slots[: len(samples)],
            columns=columns,
            num_captions=num_captions if any(map(has_multiple_captions, samples)) else None,
        )


def _stack(arrays: list[np.ndarray], length: int | None = None) -> Tensor:
    """(N, *shape) of arrays of one shape; or, given a `length`, of (tokens, …) each, with zeros behind up to it."""
    first = arrays[0]
    shape = (len(arrays), *first.shape) if length is None else (len(arrays), length, *first.shape[1:])
    stacked = _empty(shape, first.dtype)
    rows = stacked.numpy()
    for i, array in enumerate(arrays):
        if length is None:
            rows[i] = array
        else:
            rows[i, : len(array)] = array
            rows[i, len(array) :] = 0
    return stacked


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
    """A tensor to be filled; in a loader process in memory that the training process sees too, so that it need not be
    copied on its way there."""
    tensor = torch.from_numpy(np.empty(0, dtype))
    if get_worker_info() is not None:
        storage = torch.empty(0, dtype=tensor.dtype).untyped_storage()._new_shared(math.prod(shape) * dtype.itemsize)
        return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, shape)  # type: ignore[call-overload]
    return torch.empty(shape, dtype=tensor.dtype)
