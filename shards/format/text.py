"""How text latents are stored: exact float16, or e4m3 codes with a float16 scale per token; whole or trimmed.

Trimming keeps the real tokens (begin, words, end) and drops the padding. It is offered where the kept ones are what
they would be with the padding there: in causal towers, and in those from which padding was hidden. A model then needs
a mask over the tokens, in training and in sampling.

A text tower NAME has the columns `text_latents.NAME`, `text_scales.NAME` beside codes, `num_tokens.NAME` where padding
is hidden, and `pooled.NAME`. Where a sample may have several captions, each has a leading axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shards.format.towers import ONLY_TEXT, TextStorage, TextTower

FLOAT8_MAX = 448.0  # the largest finite e4m3 number
SMALLEST_SCALE = float(np.finfo(np.float16).smallest_normal)
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

    def clone(self) -> "TextLatents":
        """The same in memory of its own."""
        states, pooled = (None if tensor is None else tensor.clone() for tensor in (self.states, self.pooled))
        return TextLatents(states, self.num_tokens, pooled)


def quantise(latents: Tensor) -> tuple[Tensor, Tensor]:
    """(…, tokens, width) floats → e4m3 codes as uint8, of the same shape, and float16 scales (…, tokens).

    The scale is max|x| / 448 per token, rounded to float16 before it divides, so that decoding uses the very number
    that encoding used. A token of zeros, or one whose scale would underflow, gets the smallest normal float16.
    """
    latents = latents.float()
    scales = (latents.abs().amax(dim=-1) / FLOAT8_MAX).clamp(min=SMALLEST_SCALE).half()
    codes = (latents / scales.float().unsqueeze(-1)).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `quantise`: float32 of the codes' shape, on the codes' device."""
    return codes.view(torch.float8_e4m3fn).float() * scales.float().unsqueeze(-1)


def stored(latents: Tensor, storage: TextStorage) -> tuple[np.ndarray, ...]:
    """(…, tokens, width) → the array of them as float16; or their codes and scales."""
    if storage == "float16":
        return (latents.half().numpy(),)
    codes, scales = quantise(latents)
    return codes.numpy(), scales.numpy()


def pack(name: str, tower: TextTower, captions: Sequence[TextLatents], several: bool) -> dict[str, np.ndarray]:
    """A sample's captions, by the text tower `name` → its columns; of one caption, unless there may be `several`.

    Trimmed captions of one sample are padded with zeros to the longest.
    """
    columns: dict[str, list[np.ndarray]] = {}
    for caption in captions:
        for kind, array in _arrays(tower, caption):
            columns.setdefault(f"{kind}.{name}", []).append(array)
    if not several:
        return {column: np.atleast_1d(arrays[0]) for column, arrays in columns.items()}
    # (captions, …)
    return {column: np.stack(_pad_to_longest(arrays)) for column, arrays in columns.items()}


def _arrays(tower: TextTower, caption: TextLatents) -> list[tuple[str, np.ndarray]]:
    """One caption's columns, by their kind."""
    arrays: list[tuple[str, np.ndarray]] = []
    if tower.states:
        assert caption.states is not None
        kept = caption.states[: caption.num_tokens] if tower.trim else caption.states
        arrays += zip(("text_latents", "text_scales"), stored(kept, tower.storage), strict=False)
        if tower.hides_padding:
            arrays.append(("num_tokens", np.array(caption.num_tokens, np.int32)))
    if tower.pooled:
        assert caption.pooled is not None
        arrays.append(("pooled", caption.pooled.half().numpy()))
    return arrays


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


def current_name(column: str) -> str:
    """A column's name in version 2, where a root of version 1 may have named it."""
    return f"{column}.{ONLY_TEXT}" if column in AXES else column


def has_several(sample: dict[str, Any]) -> bool:
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
