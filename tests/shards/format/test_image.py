"""Image storage: codes and steps compared with a float64 loop, and the resulting error of posterior samples."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from hypothesis import given
from hypothesis import strategies as st

from bench.kit.roots import encoding_record
from shards.format.buckets import Bucket
from shards.format.image import columns, dequantise, draw, fast_round, pack, quantise, unpack
from shards.format.towers import ImageTower


def moments(seed: int, size: float = 5.0) -> torch.Tensor:
    """Draw means with deviation `size` and different channel scales, and log-variances inside and outside of their
    range."""
    random = torch.Generator().manual_seed(seed)
    means = torch.randn(4, 6, 7, generator=random) * size * torch.tensor([1.0, 0.1, 3.0, 0.5])[:, None, None]
    return torch.cat([means, torch.rand(4, 6, 7, generator=random) * 60 - 35])


def test_codes_are_those_of_a_plain_loop() -> None:
    latents = moments(0)
    codes, scales = quantise(latents, 4)
    decoded = dequantise(codes, scales).double().numpy()
    for c in range(4):
        plane = latents[c].double().numpy()
        scale = float(np.float32(np.abs(plane).max() / 127))
        assert float(scales[c]) == scale
        expected = np.clip(np.rint(plane / scale), -127, 127) * scale
        assert (np.abs(decoded[c] - expected) < 1e-5 * np.abs(plane).max()).all()
        log_variances = np.clip(latents[4 + c].double().numpy(), -30, 20)
        expected = np.rint((log_variances + 30) / 50 * 255) / 255 * 50 - 30
        np.testing.assert_allclose(decoded[4 + c], expected, atol=1e-5)


def test_rounding_is_torch_s() -> None:
    halves = torch.arange(-1024, 1024) / 2
    beside = torch.nextafter(halves, torch.tensor(torch.inf)), torch.nextafter(halves, torch.tensor(-torch.inf))
    for values in (halves, *beside, torch.randn(10_000) * 100):
        assert torch.equal(fast_round(values), values.round())


@given(st.integers(0, 2**16), st.floats(1e-4, 1e4))
def test_the_error_is_as_stated(seed: int, size: float) -> None:
    latents = moments(seed, size)
    error = (dequantise(*quantise(latents, 4)) - latents).abs()
    largest = latents[:4].abs().amax(dim=(1, 2))
    assert (error[:4].amax(dim=(1, 2)) <= 0.004 * largest).all()
    in_range = latents[4:].clamp(-30, 20)
    assert ((in_range - dequantise(*quantise(latents, 4))[4:]).abs() <= 50 / 255 / 2 + 1e-4).all()


@pytest.mark.parametrize("value", [0.0, 1e-30, 65504.0])
def test_zeros_and_extremes_stay_finite(value: float) -> None:
    decoded = dequantise(*quantise(torch.full((8, 2, 2), value), 4))
    assert decoded.isfinite().all()
    torch.testing.assert_close(decoded[:4], torch.full((4, 2, 2), value), rtol=0.004, atol=1e-6)


def test_a_sample_of_the_posterior_is_diffusers_own_but_for_the_stated_error() -> None:
    latents = moments(3)[None]
    exact, coarse = (
        DiagonalGaussianDistribution(parameters) for parameters in (latents, dequantise(*quantise(latents, 4)))
    )
    assert ((coarse.std / exact.std - 1).abs() < 0.05).all()  # a variance within 10 %
    noise = torch.randn(exact.mean.shape, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(draw(latents, noise), exact.sample(torch.Generator().manual_seed(4)))


@pytest.mark.parametrize("posterior", ["moments", "mean"])
@pytest.mark.parametrize("storage", ["float16", "int8"])
def test_pack_fits_its_columns(posterior: Any, storage: Any) -> None:
    fields = encoding_record(4, 4).image.model_dump() | {"posterior": posterior, "storage": storage}
    tower, bucket = ImageTower.model_validate(fields), Bucket(64, 96)
    latents = torch.randn(tower.num_planes, 12, 8)
    row, types = next(pack(tower, [latents])), columns(tower, bucket)
    assert row.keys() == types.keys()
    for name, array in row.items():
        _, dtype, shape = types[name].split(":")
        assert array.dtype == dtype and array.shape == tuple(map(int, shape.split(",")))
    scales = torch.tensor(row["image_scales"]) if storage == "int8" else None
    found = unpack(torch.tensor(row["image_latents"]), scales)
    assert (found - latents).abs().max() < (0.11 if storage == "int8" else 2e-3)
