"""How text latents are stored: exact float16, or e4m3 codes with a float16 scale per token; whole or trimmed.

Trimming keeps the real tokens (begin, words, end) and drops the padding. CLIP is causal, so the kept ones are what
they would be with the padding there; the U-Net then needs a cross-attention mask, in training and in sampling.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

TextStorage = Literal["float16", "float8"]

FLOAT8_MAX = 448.0  # the largest finite e4m3 number
SMALLEST_SCALE = float(np.finfo(np.float16).smallest_normal)


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


def pack(latents: Tensor, num_tokens: int, storage: TextStorage, trim: bool) -> dict[str, np.ndarray]:
    """(tokens, width) text latents of one caption → the columns of its sample.

    Args:
        latents: the text encoder's last hidden state, floats on the CPU.
        num_tokens: how many of them are real (begin, words, end).
        storage: `float16` gives `text_latents`; `float8` gives uint8 codes in `text_latents`, and `text_scales`.
        trim: keep the real tokens alone.
    """
    kept = latents[:num_tokens] if trim else latents
    if storage == "float16":
        return {"text_latents": kept.half().numpy()}
    codes, scales = quantise(kept)
    return {"text_latents": codes.numpy(), "text_scales": scales.numpy()}


def pack_several(captions: Sequence[tuple[Tensor, int]], storage: TextStorage, trim: bool) -> dict[str, np.ndarray]:
    """Latents and real tokens of each of a sample's captions → `pack`'s columns with a leading axis, (captions, …).

    Trimmed captions are padded with zeros to the sample's longest; then `num_tokens`, (captions,), says how many count.
    """
    rows = [pack(latents, num_tokens, storage, trim) for latents, num_tokens in captions]
    lengths = [len(row["text_latents"]) for row in rows]
    packed = {name: np.stack([pad_tokens(row[name], max(lengths)) for row in rows]) for name in rows[0]}
    return packed | ({"num_tokens": np.array(lengths, np.int32)} if trim else {})


def unpack(sample: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """What `pack` gave for each caption of a stored sample, whether it has the columns of one or of several."""
    row: dict[str, np.ndarray] = {name: sample[name] for name in ("text_latents", "text_scales") if name in sample}
    if row["text_latents"].ndim == 2:
        return [row]
    num_captions, longest = row["text_latents"].shape[:2]
    lengths = sample.get("num_tokens", [longest] * num_captions)
    return [{name: array[i, : lengths[i]] for name, array in row.items()} for i in range(num_captions)]


def pad_tokens(array: np.ndarray, length: int) -> np.ndarray:
    """(tokens, …) → (length, …), zeros behind."""
    return np.pad(array, [(0, length - len(array)), *[(0, 0)] * (array.ndim - 1)])


def columns(storage: TextStorage, trim: bool, length: int, width: int, several: bool = False) -> dict[str, str]:
    """The MDS column types of `pack`'s result, or of `pack_several`'s.

    A trimmed caption's length varies, as does the number of captions where a sample may have several: the shape is
    then stored with each sample.
    """
    dtype = "float16" if storage == "float16" else "uint8"
    fixed = not (trim or several)
    types = {"text_latents": f"ndarray:{dtype}:{length},{width}" if fixed else f"ndarray:{dtype}"}
    if storage == "float8":
        types["text_scales"] = f"ndarray:float16:{length}" if fixed else "ndarray:float16"
    if several and trim:
        types["num_tokens"] = "ndarray:int32"
    return types
