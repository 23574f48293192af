"""Text storage: codes and scales compared with a float64 loop, and trimming."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.kit.roots import encoding_record
from shards.format.text import TextLatents, columns, dequantise, pack, quantise, quantise_in_chunks, unpack
from shards.format.towers import TextTower


def e4m3_values() -> np.ndarray:
    """Return every finite e4m3 number by its definition: sign × 2^(e − 7) × (1 + m/8), with subnormals m/8 × 2^−6."""
    values = [0.0]
    for exponent in range(16):
        for mantissa in range(8):
            if exponent == 15 and mantissa == 7:
                continue  # NaN
            magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
            values += [magnitude, -magnitude]
    return np.unique(values)


def test_codes_are_the_nearest_e4m3_number() -> None:
    table = e4m3_values()
    latents = torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    codes, scales = quantise(latents)
    decoded = dequantise(codes, scales).double().numpy()
    for row in range(5):
        scale = float(scales[row])
        for column in range(33):
            exact = float(latents[row, column]) / scale
            nearest = np.abs(table - np.clip(exact, -448, 448)).min()
            assert abs(decoded[row, column] / scale - np.clip(exact, -448, 448)) <= nearest + 1e-5 * abs(exact)


def test_error_on_gaussian_data_is_as_stated() -> None:
    latents = torch.randn(77, 1024, generator=torch.Generator().manual_seed(1))
    error = (dequantise(*quantise(latents)) - latents).norm() / latents.norm()
    assert 0.02 < error < 0.03


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-7, 1.0, 65504.0])
def test_zeros_and_extremes_stay_finite(value: float) -> None:
    latents = torch.full((2, 4), value)
    decoded = dequantise(*quantise(latents))
    assert decoded.isfinite().all()
    torch.testing.assert_close(decoded, latents, rtol=0.07, atol=1e-6)


def tower(storage: str, trim: bool) -> TextTower:
    return encoding_record(16, 8, storage=storage, trim=trim).texts["text"]


def pack_one(latents: torch.Tensor, num_tokens: int, storage: str, trim: bool) -> dict[str, np.ndarray]:
    return next(pack("text", tower(storage, trim), [[TextLatents(latents, num_tokens)]], several=False))


@given(st.integers(1, 16), st.sampled_from(["float16", "float8"]), st.booleans())
def test_pack_fits_its_columns(num_tokens: int, storage: str, trim: bool) -> None:
    latents = torch.randn(16, 8)
    row = pack_one(latents, num_tokens, storage, trim)
    types = columns("text", tower(storage, trim))
    assert row.keys() == types.keys()
    for name, array in row.items():
        _, dtype, *shape = types[name].split(":")
        assert array.dtype == dtype
        if name == "num_tokens.text":
            assert array.tolist() == [num_tokens]
            continue
        assert len(array) == (num_tokens if trim else 16)
        assert not shape or array.shape == tuple(map(int, shape[0].split(",")))


@pytest.mark.parametrize("storage", ["float16", "float8"])
def test_what_trimming_keeps_is_as_it_was(storage: str) -> None:
    latents = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
    whole, trimmed = (pack_one(latents, 5, storage, trim) for trim in (False, True))
    assert trimmed.pop("num_tokens.text").tolist() == [5]
    for name, array in trimmed.items():
        np.testing.assert_array_equal(array, whole[name][:5])


@given(st.integers(0, 2**16), st.lists(st.integers(1, 40), max_size=8), st.sampled_from([8, 1000, 20_000]))
def test_pieces_change_no_byte(seed: int, lengths: list[int], width: int) -> None:
    """Compare tensors that share a piece, and tensors in several pieces, with separate quantisation."""
    random = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(length, width, generator=random).half() for length in lengths]
    for found, tensor in zip(quantise_in_chunks(quantise, tensors), tensors, strict=True):
        for array, alone in zip(found, quantise(tensor), strict=True):
            np.testing.assert_array_equal(array, alone.numpy())


@given(st.lists(st.integers(1, 16), min_size=1, max_size=4), st.sampled_from(["float16", "float8"]), st.booleans())
def test_several_captions_come_back_as_each_alone(lengths: list[int], storage: str, trim: bool) -> None:
    captions = [TextLatents(torch.randn(16, 8), num_tokens) for num_tokens in lengths]
    row = next(pack("text", tower(storage, trim), [captions], several=True))
    assert row.keys() == columns("text", tower(storage, trim), several=True).keys()
    for found, caption in zip(unpack(row), captions, strict=True):
        assert caption.states is not None
        (alone,) = unpack(pack_one(caption.states, caption.num_tokens, storage, trim))
        assert found.keys() == alone.keys() and int(found["num_tokens.text"]) == (caption.num_tokens if trim else 16)
        for name in ("text_latents.text", "text_scales.text")[: 1 + (storage == "float8")]:
            kept = len(alone[name])
            np.testing.assert_array_equal(found[name][:kept], alone[name])
            assert not found[name][kept:].any()  # zeros up to the sample's longest
