"""Text storage: codes and scales against a float64 loop, and what trimming keeps."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.format.text import columns, dequantise, pack, pack_several, quantise, unpack


def e4m3_values() -> np.ndarray:
    """Every finite e4m3 number, written out: sign × 2^(e − 7) × (1 + m/8), with subnormals m/8 × 2^−6."""
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


@settings(deadline=None)
@given(st.integers(1, 16), st.sampled_from(["float16", "float8"]), st.booleans())
def test_pack_fits_its_columns(num_tokens: int, storage: str, trim: bool) -> None:
    latents = torch.randn(16, 8)
    row = pack(latents, num_tokens, storage, trim)  # type: ignore[arg-type]
    types = columns(storage, trim, 16, 8)  # type: ignore[arg-type]
    assert row.keys() == types.keys()
    for name, array in row.items():
        _, dtype, *shape = types[name].split(":")
        assert array.dtype == dtype
        assert len(array) == (num_tokens if trim else 16)
        assert not shape or array.shape == tuple(map(int, shape[0].split(",")))


@pytest.mark.parametrize("storage", ["float16", "float8"])
def test_what_trimming_keeps_is_as_it_was(storage: str) -> None:
    latents = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
    whole, trimmed = (pack(latents, 5, storage, trim) for trim in (False, True))  # type: ignore[arg-type]
    for name, array in trimmed.items():
        np.testing.assert_array_equal(array, whole[name][:5])


@settings(deadline=None)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=4), st.sampled_from(["float16", "float8"]), st.booleans())
def test_several_captions_come_back_as_each_alone(lengths: list[int], storage: str, trim: bool) -> None:
    captions = [(torch.randn(16, 8), num_tokens) for num_tokens in lengths]
    row = pack_several(captions, storage, trim)  # type: ignore[arg-type]
    assert row.keys() == columns(storage, trim, 16, 8, several=True).keys()  # type: ignore[arg-type]
    for found, (latents, num_tokens) in zip(unpack(row), captions, strict=True):
        alone = pack(latents, num_tokens, storage, trim)  # type: ignore[arg-type]
        assert found.keys() == alone.keys()
        for name in alone:
            np.testing.assert_array_equal(found[name], alone[name])
