"""Storage of text latents: exact float16, or e4m3 codes with a float16 scale per token, padded or trimmed.

Trimming keeps the real tokens (begin, words, end) and drops the padding. It is supported only for towers in which
padding does not affect the real tokens: causal towers, and towers with a padding mask. The trained model then needs an
attention mask over the tokens, in training and in sampling.

The columns of a text tower NAME are `text_latents.NAME`, with `text_scales.NAME` for e4m3 codes; `num_tokens.NAME` if
padding is masked; and `pooled.NAME`. If samples may have several captions, each column has a leading caption axis.

torch is imported inside the functions that need it, so that reading a config or a root does not require this slow
import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from shards.format.towers import TextStorage, TextTower

if TYPE_CHECKING:
    from torch import Tensor

FLOAT8_MAX = 448.0  # the largest finite e4m3 number
SMALLEST_SCALE = float(np.finfo(np.float16).smallest_normal)
CHUNK_ELEMENTS = 1 << 14
"""Number of elements quantised at once. With fewer elements, torch's call overhead dominates. More elements would
exceed a core's cache, and from 32,768 elements on, torch splits the work among threads, which stall while other threads
are busy decoding."""
AXES = {"text_latents": 2, "text_scales": 1, "num_tokens": 0, "pooled": 1}
"""Kind of column → number of axes of one caption's array."""
TEXT_SAMPLE = "text_sample"
"""Column with the number, within the MDS file, of the sample that stores the text, (1,) int32, in roots with
de-duplicated text. In the other samples with the same text, the text columns are empty."""
CAPTION_WEIGHTS = "caption_weights"
"""Column with the weight of each of a sample's captions, (captions,) int32, in roots whose sources differ in weight."""


@dataclass(frozen=True)
class TextLatents:
    """Output of one text tower for one caption, in CPU memory."""

    states: Tensor | None
    """(tokens, width), including padding, or None if only the pooled output is stored."""
    num_tokens: int
    """Number of real tokens (begin, words, end), which precede the padding."""
    pooled: Tensor | None = None
    """(pooled,), or None if no pooled output is stored."""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are present."""
        return [tensor for tensor in (self.states, self.pooled) if tensor is not None]

    def clone(self) -> TextLatents:
        """Return a copy that owns its memory."""
        states, pooled = (None if tensor is None else tensor.clone() for tensor in (self.states, self.pooled))
        return TextLatents(states, self.num_tokens, pooled)


def quantise(latents: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise (…, tokens, width) floats to e4m3 codes (as uint8, same shape) and float16 scales (…, tokens).

    The scale is max|x| / 448 per token, rounded to float16 before the division, so that decoding uses exactly the scale
    that encoding used. All-zero tokens, and tokens whose scale would underflow, get the smallest normal float16.
    """
    import torch

    latents = latents.float()
    scales = (latents.abs().amax(dim=-1) / FLOAT8_MAX).clamp(min=SMALLEST_SCALE).half()
    codes = (latents / scales.float().unsqueeze(-1)).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """Invert `quantise`: return float32 values with the codes' shape and device."""
    import torch

    return codes.view(torch.float8_e4m3fn).float() * scales.float().unsqueeze(-1)


Quantise = Callable[["Tensor"], tuple["Tensor", "Tensor"]]
"""Function from (rows, …) floats to codes of the same shape and (rows, …) scales, treating each row independently."""


def quantise_in_chunks(quantise: Quantise, tensors: Iterable[Tensor]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the codes and scales of each (rows, …) tensor, batching small tensors and splitting large ones."""
    batch: list[Tensor] = []
    for tensor in tensors:
        if batch and (len(batch) + 1) * tensor.numel() > CHUNK_ELEMENTS:  # tensors are of similar size
            yield from _quantise_together(quantise, batch)
            batch = []
        batch.append(tensor)
    if batch:
        yield from _quantise_together(quantise, batch)


def _quantise_together(quantise: Quantise, tensors: list[Tensor]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    import torch

    rows = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    pieces = [quantise(piece) for piece in rows.split(max(1, CHUNK_ELEMENTS // rows[0].numel()))]
    codes, scales = (np.concatenate([part.numpy() for part in parts]) for parts in zip(*pieces, strict=True))
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.shape[0]
        yield codes[begin:end], scales[begin:end]


def encode_states(latents: Iterable[Tensor], storage: TextStorage) -> Iterator[tuple[np.ndarray, ...]]:
    """Encode each (tokens, width) tensor as a float16 array, or as arrays of e4m3 codes and scales."""
    if storage == "float16":
        return ((tensor.half().numpy(),) for tensor in latents)
    return quantise_in_chunks(quantise, latents)


def pack(
    name: str, tower: TextTower, samples: Sequence[Sequence[TextLatents]], several: bool
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the columns of each sample, given its captions as encoded by the text tower `name`.

    Unless samples may have `several` captions, each sample has exactly one caption. If captions are trimmed, those of
    one sample are zero-padded to the length of its longest caption.
    """
    caption_arrays = _arrays(tower, [caption for captions in samples for caption in captions])
    for captions in samples:
        columns: dict[str, list[np.ndarray]] = {}
        for arrays_by_kind in islice(caption_arrays, len(captions)):
            for kind, array in arrays_by_kind:
                columns.setdefault(f"{kind}.{name}", []).append(array)
        if several:  # (captions, …)
            yield {column: _stacked(arrays) for column, arrays in columns.items()}
        else:
            yield {column: np.atleast_1d(arrays[0]) for column, arrays in columns.items()}


def _arrays(tower: TextTower, captions: Sequence[TextLatents]) -> Iterator[list[tuple[str, np.ndarray]]]:
    """Yield the (kind of column, array) pairs of each caption."""
    kept = (
        caption.states[: caption.num_tokens if tower.trim else None]
        for caption in captions
        if caption.states is not None
    )
    states = encode_states(kept, tower.storage) if tower.states else repeat((), len(captions))
    for caption, state_arrays in zip(captions, states, strict=True):
        arrays: list[tuple[str, np.ndarray]] = [*zip(("text_latents", "text_scales"), state_arrays, strict=False)]
        if tower.states and tower.hides_padding:
            arrays.append(("num_tokens", np.array(caption.num_tokens, np.int32)))
        if tower.pooled:
            assert caption.pooled is not None
            arrays.append(("pooled", caption.pooled.half().numpy()))
        yield arrays


def _stacked(arrays: list[np.ndarray]) -> np.ndarray:
    """Stack scalars, or stack (tokens, …) arrays after zero-padding them to the length of the longest array."""
    if not arrays[0].ndim:
        return np.stack(arrays)
    length = max(map(len, arrays))
    return np.stack([pad_tokens(array, length) for array in arrays])


def pad_tokens(array: np.ndarray, length: int) -> np.ndarray:
    """Zero-pad an array of shape (tokens, …) at the end to shape (length, …)."""
    return np.pad(array, [(0, length - len(array)), *[(0, 0)] * (array.ndim - 1)])


def kind_of(column: str) -> str | None:
    """Return the kind of a text column (`text_latents` for `text_latents.clip`), or None for other columns."""
    kind, _, tower = column.partition(".")
    return kind if tower and kind in AXES else None


def with_duplicate_text(sample: dict[str, Any], row: int, read: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Fill in a sample's text columns from the sample that stores them.

    Args:
        row: the sample's number in the file.
        read: returns another sample of the file, given its number.
    """
    if TEXT_SAMPLE not in sample or (first := int(sample[TEXT_SAMPLE][0])) == row:
        return sample
    return sample | {column: array for column, array in read(first).items() if kind_of(column)}


def has_multiple_captions(sample: dict[str, Any]) -> bool:
    """Return whether a stored sample's text columns have a leading caption axis."""
    kinds = ((kind_of(column), array) for column, array in sample.items())
    return any(array.ndim > AXES[kind] for kind, array in kinds if kind and kind != "num_tokens")


def unpack(sample: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """Split a stored sample into the text columns of each caption, with each caption as often as its weight says."""
    rows = unpack_stored(sample)
    if CAPTION_WEIGHTS not in sample:
        return rows
    return [row for row, weight in zip(rows, sample[CAPTION_WEIGHTS].tolist(), strict=True) for _ in range(weight)]


def unpack_stored(sample: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """Split a stored sample into the text columns of each caption, once each.

    `num_tokens.NAME` is added for every tower with states. Captions shorter than the sample's longest caption keep
    their zero padding.
    """
    columns = {}
    for column, array in sample.items():
        if kind := kind_of(column):
            columns[column] = array if array.ndim > AXES[kind] else array[None]
    rows = [dict(zip(columns, arrays, strict=True)) for arrays in zip(*columns.values(), strict=True)]
    for row in rows:
        for column in [column for column in row if column.startswith("text_latents.")]:
            # without a num_tokens column, every stored token is real
            row.setdefault(column.replace("text_latents", "num_tokens", 1), np.int32(len(row[column])))
    return rows


def columns(name: str, tower: TextTower, several: bool = False, deduplicates: bool = False) -> dict[str, str]:
    """Return the MDS column types of `pack`'s output.

    The shape is part of the type unless it varies, as it does for trimmed captions, for samples with several captions,
    and if text is de-duplicated. In that case, each sample stores its own shape.
    """
    types = {}
    fixed = not (tower.trim or several or deduplicates)
    if tower.states:
        dtype = "float16" if tower.storage == "float16" else "uint8"
        types[f"text_latents.{name}"] = f"ndarray:{dtype}:{tower.length},{tower.width}" if fixed else f"ndarray:{dtype}"
        if tower.storage == "float8":
            types[f"text_scales.{name}"] = f"ndarray:float16:{tower.length}" if fixed else "ndarray:float16"
        if tower.hides_padding:
            types[f"num_tokens.{name}"] = "ndarray:int32" if several or deduplicates else "ndarray:int32:1"
    if tower.pooled:
        types[f"pooled.{name}"] = "ndarray:float16" if several or deduplicates else f"ndarray:float16:{tower.pooled}"
    return types
