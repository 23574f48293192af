"""Bucket names and which pictures fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.format.buckets import Bucket

sides = st.integers(1, 99_999)


@given(sides, sides)
def test_names_come_back(width: int, height: int) -> None:
    assert Bucket.parse(str(Bucket(width, height))) == Bucket(width, height)


@pytest.mark.parametrize("name", ["256", "256x", "x256", "0x64", "64X64", "64x64 ", "-64x64", "../x", "064x64"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="WIDTHxHEIGHT"):
        Bucket.parse(name)


@pytest.mark.parametrize(
    ("width", "height", "fits"),
    [(64, 32, True), (63, 32, False), (64, 31, False), (640, 320, True)],  # a side that is one pixel short does not fit
)
def test_never_enlarged(width: int, height: int, fits: bool) -> None:
    assert Bucket(64, 32).fits(width, height) is fits


def test_latent_shape() -> None:
    assert Bucket(576, 448).latent_hw(8) == (56, 72)
    with pytest.raises(ValueError, match="not a multiple"):
        Bucket(100, 64).latent_hw(8)
