"""Images that are shrunk at download look to stage 1 like the originals."""

import io
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from PIL import Image

from precompute.download.shrink import keep, shrink
from precompute.pixels.decode import LimitsConfig, PixelsConfig, decode
from precompute.pixels.opening import ORIENTATION_TAG, TURNS
from shards.format.buckets import Bucket
from tests.precompute.pixels import icc
from tests.tiny import saved


def gradient(width: int, height: int) -> Image.Image:
    """An image in which every corner differs."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, 255 - x], -1).astype(np.uint8))


def rotated(image: Image.Image, orientation: int, format: str) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = orientation
    return saved(image, format, exif=exif, **({"quality": 95} if format == "JPEG" else {}))


def rotated_gradient(orientation: int, format: str) -> bytes:
    return rotated(gradient(400, 200), orientation, format)


BOX = (0.1, 0.2, 0.25, 0.3)
FILES: dict[str, Callable[[], bytes]] = {
    **{f"JPEG {orientation}": partial(rotated_gradient, orientation, "JPEG") for orientation in TURNS},
    **{f"TIFF {orientation}": partial(rotated_gradient, orientation, "TIFF") for orientation in TURNS},
    "16-bit grey": lambda: saved(Image.fromarray(np.full((200, 400), 20000, np.uint16)), "PNG"),
    "Adobe RGB": lambda: saved(gradient(300, 200), "PNG", icc_profile=icc.rgb_profile(icc.ADOBE_RGB, 1.8)),
    "transparent": lambda: saved(Image.new("RGBA", (300, 300), (255, 0, 0, 128)), "PNG"),
    "CMYK": lambda: saved(gradient(300, 200).convert("CMYK"), "JPEG", quality=95),
    "palette": lambda: saved(gradient(300, 200).quantize(64), "PNG"),
    "malformed EXIF": lambda: saved(gradient(300, 200), "JPEG", dpi=(72, 72), exif=b"Exif\0\0garbage", quality=95),
}
"""Functions, so that only one process makes the images."""


@pytest.mark.parametrize("name", FILES)
def test_stage_1_sees_the_same_image(name: str) -> None:
    original = FILES[name]()
    data, width, height, original_width, original_height, error = shrink(io.BytesIO(original), max_side=200, quality=95)
    assert error is None and data is not None and width is not None and height is not None
    small = Image.open(io.BytesIO(data))
    assert small.format == "JPEG" and small.mode == "RGB" and max(small.size) == 200
    assert dict(small.getexif()) == ({ORIENTATION_TAG: int(name[-1])} if name[-1] in "2345678" else {})
    bucket, config, limits = Bucket(64, 64), PixelsConfig(), LimitsConfig()
    expected, found = (decode(file, [bucket], config, limits) for file in (original, data))
    assert (expected.width, expected.height) == (original_width, original_height)
    assert (found.width, found.height) == (width, height)
    difference = np.abs(expected.pixels[bucket].astype(int) - found.pixels[bucket])
    assert difference.mean() < 4 and np.median(difference) <= 3


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF"])  # Pillow itself rotates TIFFs
@pytest.mark.parametrize("orientation", TURNS)
def test_stage_1_blurs_the_same_boxes(orientation: int, format: str) -> None:
    """Boxes may refer to the upright image or to the image as stored, so both places are blurred."""
    stripes = Image.fromarray(np.indices((64, 64, 3)).sum(axis=0).astype(np.uint8) // 4 % 2 * 255)
    original = rotated(stripes, orientation, format)
    shrunk, *_ = shrink(io.BytesIO(original), max_side=200, quality=95)
    assert shrunk is not None
    bucket, config, limits = Bucket(64, 64), PixelsConfig(), LimitsConfig()

    def blurred(file: bytes) -> np.ndarray:
        """Return which pixels are blurred."""
        sharp, found = (decode(file, [bucket], config, limits, (), boxes).pixels[bucket] for boxes in ([], [BOX]))
        return np.abs(sharp.astype(int) - found).max(axis=2) > 25

    expected, found = blurred(original), blurred(shrunk)
    assert 0 < expected.mean() < 0.1
    # Pillow decodes a TIFF upright, so its boxes are rounded to other pixels
    assert (expected != found).sum() < 0.35 * expected.sum()


def test_small_images_keep_their_size_and_damaged_ones_are_refused() -> None:
    assert shrink(io.BytesIO(saved(gradient(60, 90), "PNG")), max_side=200, quality=95)[1:3] == (60, 90)
    whole = saved(gradient(300, 200), "PNG")
    for data, reason in ((b"<html>", "not_an_image"), (whole[: len(whole) // 2], "undecodable")):
        assert shrink(io.BytesIO(data), max_side=200, quality=95) == (*[None] * 5, f"Image decoding error: {reason}")
    assert keep(io.BytesIO(whole)) == (whole, *[None] * 5)
