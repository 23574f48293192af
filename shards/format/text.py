"""How text latents are stored: exact float16, or e4m3 codes with a float16 scale per token; whole or trimmed.

Trimming keeps the real tokens (begin, words, end) and drops the padding. It is offered where the kept ones are what
they would be with the padding there: in causal towers, and in those from which padding was hidden. A model then needs
a mask over the tokens, in training and in sampling.

A text tower NAME has the columns `text_latents.NAME`, `text_scales.NAME` beside codes, `num_tokens.NAME` where padding
is hidden, and `pooled.NAME`. Where a sample may have several captions, each has a leading axis.

torch is imported inside the functions that need it: reading a config or a root must not cost its import.
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
PIECE = 1 << 14
"""Numbers that are quantised at once: of fewer, beginning takes torch longer than the work; more leave a core's cache,
and from 32,768 on torch divides them among threads, which wait for each other where others decode."""
AXES = {"text_latents": 2, "text_scales": 1, "num_tokens": 0, "pooled": 1}
"""Kind of column → axes that one caption's array has."""


@dataclass(frozen=True)
class TextLatents:
    """What one text tower made of one caption; on the CPU."""

    states: Tensor | None
    """(tokens, width), padding included; None where only the pooled output is stored."""
    num_tokens: int
    """Real tokens among them, which come first: begin, words, end."""
    pooled: Tensor | None = None
    """(pooled,); None where it is not stored."""

    @property
    def tensors(self) -> list[Tensor]:
        """Those that there are."""
        return [tensor for tensor in (self.states, self.pooled) if tensor is not None]

    def clone(self) -> TextLatents:
        """The same in memory of its own."""
        states, pooled = (None if tensor is None else tensor.clone() for tensor in (self.states, self.pooled))
        return TextLatents(states, self.num_tokens, pooled)


def quantise(latents: Tensor) -> tuple[Tensor, Tensor]:
    """(…, tokens, width) floats → e4m3 codes as uint8, of the same shape, and float16 scales (…, tokens).

    The scale is max|x| / 448 per token, rounded to float16 before it divides, so that decoding uses the very number
    that encoding used. A token of zeros, or one whose scale would underflow, gets the smallest normal float16.
    """
    import torch

    latents = latents.float()
    scales = (latents.abs().amax(dim=-1) / FLOAT8_MAX).clamp(min=SMALLEST_SCALE).half()
    codes = (latents / scales.float().unsqueeze(-1)).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `quantise`: float32 of the codes' shape, on the codes' device."""
    import torch

    return codes.view(torch.float8_e4m3fn).float() * scales.float().unsqueeze(-1)


Quantise = Callable[["Tensor"], tuple["Tensor", "Tensor"]]
"""(rows, …) floats → codes of the same shape and (rows, …) scales; each row by itself."""


def quantise_in_chunks(quantise: Quantise, tensors: Iterable[Tensor]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(rows, …) floats each → each one's codes and scales: small ones together, a large one a piece after the other."""
    held: list[Tensor] = []
    for tensor in tensors:
        if held and (len(held) + 1) * tensor.numel() > PIECE:  # they are about as large as each other
            yield from _together(quantise, held)
            held = []
        held.append(tensor)
    if held:
        yield from _together(quantise, held)


def _together(quantise: Quantise, tensors: list[Tensor]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    import torch

    rows = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    pieces = [quantise(piece) for piece in rows.split(max(1, PIECE // rows[0].numel()))]
    codes, scales = (np.concatenate([part.numpy() for part in parts]) for parts in zip(*pieces, strict=True))
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.shape[0]
        yield codes[begin:end], scales[begin:end]


def stored(latents: Iterable[Tensor], storage: TextStorage) -> Iterator[tuple[np.ndarray, ...]]:
    """(tokens, width) each → the array of each as float16; or its codes and scales."""
    if storage == "float16":
        return ((tensor.half().numpy(),) for tensor in latents)
    return quantise_in_chunks(quantise, latents)


def pack(
    name: str, tower: TextTower, samples: Sequence[Sequence[TextLatents]], several: bool
) -> Iterator[dict[str, np.ndarray]]:
    """Samples' captions, by the text tower `name` → each sample's columns; of one caption, unless there may be
    `several`.

    Trimmed captions of one sample are padded with zeros to the longest.
    """
    of_captions = _arrays(tower, [caption for captions in samples for caption in captions])
    for captions in samples:
        columns: dict[str, list[np.ndarray]] = {}
        for of_caption in islice(of_captions, len(captions)):
            for kind, array in of_caption:
                columns.setdefault(f"{kind}.{name}", []).append(array)
        if several:  # (captions, …)
            yield {column: np.stack(_pad_to_longest(arrays)) for column, arrays in columns.items()}
        else:
            yield {column: np.atleast_1d(arrays[0]) for column, arrays in columns.items()}


def _arrays(tower: TextTower, captions: Sequence[TextLatents]) -> Iterator[list[tuple[str, np.ndarray]]]:
    """Each caption's columns, by their kind."""
    states = stored((_kept(tower, caption) for caption in captions), tower.storage) if tower.states else repeat(())
    for caption, of_states in zip(captions, states, strict=False):
        arrays: list[tuple[str, np.ndarray]] = [*zip(("text_latents", "text_scales"), of_states, strict=False)]
        if tower.states and tower.hides_padding:
            arrays.append(("num_tokens", np.array(caption.num_tokens, np.int32)))
        if tower.pooled:
            assert caption.pooled is not None
            arrays.append(("pooled", caption.pooled.half().numpy()))
        yield arrays


def _kept(tower: TextTower, caption: TextLatents) -> Tensor:
    assert caption.states is not None
    return caption.states[: caption.num_tokens] if tower.trim else caption.states


def _pad_to_longest(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """(tokens, …) each → all of one length."""
    if not arrays[0].ndim:
        return arrays
    length = max(map(len, arrays))
    return [pad_tokens(array, length) for array in arrays]


def pad_tokens(array: np.ndarray, length: int) -> np.ndarray:
    """(tokens, …) → (length, …), zeros behind."""
    return np.pad(array, [(0, length - len(array)), *[(0, 0)] * (array.ndim - 1)])


def kind_of(column: str) -> str | None:
    """`text_latents` of `text_latents.clip`; None where a column is not of a text tower."""
    kind, _, tower = column.partition(".")
    return kind if tower and kind in AXES else None


def has_multiple_captions(sample: dict[str, Any]) -> bool:
    """Whether a stored sample's text columns have a leading axis of captions."""
    kinds = ((kind_of(column), array) for column, array in sample.items())
    return any(array.ndim > AXES[kind] for kind, array in kinds if kind and kind != "num_tokens")


def unpack(sample: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """A stored sample → the text columns of each of its captions; `num_tokens.NAME` of every tower's states, too.

    What is shorter than the sample's longest caption keeps the zeros behind it.
    """
    columns = {column: _with_captions(column, array) for column, array in sample.items() if kind_of(column)}
    num_captions = len(next(iter(columns.values())))
    rows = [{column: array[i] for column, array in columns.items()} for i in range(num_captions)]
    for row in rows:
        for column in [column for column in row if column.startswith("text_latents.")]:
            # a root may say with the array's shape alone how many tokens there are
            row.setdefault(column.replace("text_latents", "num_tokens", 1), np.int32(len(row[column])))
    return rows


def _with_captions(column: str, array: np.ndarray) -> np.ndarray:
    """A column's array with a leading axis of captions, also where a sample can have no more than one."""
    axes = AXES[str(kind_of(column))]
    return array if array.ndim > axes else array[None]


def columns(name: str, tower: TextTower, several: bool = False) -> dict[str, str]:
    """The MDS column types of `pack`'s result.

    A trimmed caption's length varies, as does the number of captions where a sample may have several: the shape is
    then stored with each sample.
    """
    types = {}
    fixed = not (tower.trim or several)
    if tower.states:
        dtype = "float16" if tower.storage == "float16" else "uint8"
        types[f"text_latents.{name}"] = f"ndarray:{dtype}:{tower.length},{tower.width}" if fixed else f"ndarray:{dtype}"
        if tower.storage == "float8":
            types[f"text_scales.{name}"] = f"ndarray:float16:{tower.length}" if fixed else "ndarray:float16"
        if tower.hides_padding:
            types[f"num_tokens.{name}"] = "ndarray:int32" if several else "ndarray:int32:1"
    if tower.pooled:
        types[f"pooled.{name}"] = "ndarray:float16" if several else f"ndarray:float16:{tower.pooled}"
    return types
