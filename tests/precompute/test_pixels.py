"""Decoding: sizes, crops, odd files, and a full-decode reference."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from precompute.pixels import LimitsConfig, PixelsConfig, Reject, crop_box, decode
from shards.buckets import Bucket
from tests.tiny import picture

SMALL, LARGE = Bucket(64, 64), Bucket(128, 128)
LIMITS = LimitsConfig()


def saved(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def decode_plain(data: bytes, bucket: Bucket) -> np.ndarray:
    """The independent reference: full decode, resize to cover, centre crop in whole pixels."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return np.asarray(
        image.resize((bucket.width, bucket.height), Image.Resampling.BICUBIC, box=crop_box(*image.size, bucket))
    )


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / max(1e-9, ((a.astype(float) - b.astype(float)) ** 2).mean())))


@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([SMALL, LARGE, Bucket(96, 64), Bucket(448, 576)]))
def test_crop_is_inside_centred_and_of_the_right_shape(width: int, height: int, bucket: Bucket) -> None:
    left, top, right, bottom = crop_box(width, height, bucket)
    assert left >= -1e-6 and top >= -1e-6 and right <= width + 1e-6 and bottom <= height + 1e-6
    assert abs((left + right) - width) < 1e-6 * width + 1e-9
    assert abs((top + bottom) - height) < 1e-6 * height + 1e-9
    assert (right - left) * bucket.height == pytest.approx((bottom - top) * bucket.width)
    assert np.isclose(right - left, width) or np.isclose(bottom - top, height)  # the largest such part


def test_each_bucket_that_it_covers_and_no_other() -> None:
    data = picture(np.random.default_rng(0), 100, 127)
    result = decode(data, [SMALL, LARGE], PixelsConfig(), LIMITS)
    assert list(result.pixels) == [SMALL]
    assert result.pixels[SMALL].shape == (64, 64, 3)
    assert (result.width, result.height, result.corners[SMALL]) == (100, 127, (14, 0))
    with pytest.raises(Reject, match="100x63") as caught:
        decode(picture(np.random.default_rng(0), 100, 63), [SMALL], PixelsConfig(), LIMITS)
    assert caught.value.reason == "too_small"


@pytest.mark.parametrize("size", [(1600, 1200), (640, 480), (300, 700)])
def test_scaled_decoding_is_close_to_the_full_one(size: tuple[int, int]) -> None:
    data = picture(np.random.default_rng(1), *size)
    result = decode(data, [SMALL, LARGE], PixelsConfig(), LIMITS)
    for bucket, pixels in result.pixels.items():
        assert psnr(pixels, decode_plain(data, bucket)) > 40


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation: int) -> None:
    """The stored picture is turned; what comes out is as a viewer shows it."""
    shown = np.zeros((96, 64, 3), np.uint8)
    shown[:32], shown[:, :16] = (255, 0, 0), (0, 0, 255)
    transposed = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,  # the camera's turn is undone by the viewer's
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    image = Image.fromarray(shown)
    stored = image if transposed is None else image.transpose(transposed)
    exif = Image.Exif()
    exif[0x0112] = orientation
    bucket = Bucket(64, 96)
    result = decode(saved(stored, "JPEG", exif=exif, quality=95), [bucket], PixelsConfig(), LIMITS)
    assert (result.width, result.height) == (64, 96)
    assert psnr(result.pixels[bucket], shown) > 25


@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "RGBA", "LA", "I;16", "1"])
def test_modes_become_rgb(mode: str) -> None:
    grey = Image.new("L", (64, 64), 128)
    if mode == "I;16":
        image = Image.fromarray(np.full((64, 64), 128 * 257, np.uint16))
    elif mode in ("RGBA", "LA"):
        image = grey.convert(mode)
        image.putalpha(128)
    else:
        image = grey.convert(mode)
    data = saved(image, "JPEG" if mode == "CMYK" else "PNG")
    pixels = decode(data, [SMALL], PixelsConfig(), LIMITS).pixels[SMALL]
    assert pixels.dtype == np.uint8 and pixels.shape == (64, 64, 3)
    expected = {"RGBA": 191, "LA": 191, "1": 127}.get(mode, 128)  # half transparent over white; dithered
    assert abs(pixels.mean() - expected) < 3


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not_an_image"),
        (b"<html><body>404</body></html>", "not_an_image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n", "not_an_image"),
        (picture(np.random.default_rng(2), 200, 200, "PNG")[:-2000], "undecodable"),
        (picture(np.random.default_rng(2), 200, 200)[:-1000], "undecodable"),
        (saved(Image.new("1", (12_000, 12_000))), "too_many_pixels"),
        (saved(Image.new("1", (40_000, 64))), "too_many_pixels"),
    ],
    ids=["empty", "html", "postscript", "cut-png", "cut-jpeg", "bomb", "ribbon"],
)
def test_bad_pictures_are_rejected(data: bytes, reason: str) -> None:
    with pytest.raises(Reject) as caught:
        decode(data, [SMALL], PixelsConfig(), LIMITS)
    assert caught.value.reason == reason


def test_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(data, [SMALL], PixelsConfig(), LIMITS).pixels[SMALL][0, 0].tolist() == [255, 0, 0]


def test_a_crop_whose_edges_round_outside_is_decoded() -> None:
    """450x579 into 448x576: the plain arithmetic gives a left of -2.8e-14, which Pillow refuses."""
    bucket = Bucket(448, 576)
    data = saved(Image.new("RGB", (450, 579)))
    assert decode(data, [bucket], PixelsConfig(), LIMITS).pixels[bucket].shape == (576, 448, 3)


def test_want_of_memory_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def starve(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("precompute.pixels._upright_rgb", starve)
    with pytest.raises(MemoryError):
        decode(saved(Image.new("RGB", (64, 64))), [SMALL], PixelsConfig(), LIMITS)
