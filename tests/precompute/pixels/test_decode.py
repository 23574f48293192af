"""Decoding: sizes, crops, odd files, and a full-decode reference."""

import io
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin, TiffImagePlugin

from bench.pixels import photograph
from precompute.input.reject import Reject
from precompute.pixels.decode import LimitsConfig, PixelsConfig, decode
from precompute.pixels.opening import FORMATS, TURNS
from precompute.pixels.resample import place
from shards.format.buckets import Bucket
from tests.tiny import picture, saved

SMALL, LARGE = Bucket(64, 64), Bucket(128, 128)
LIMITS = LimitsConfig()


def decode_plain(data: bytes, bucket: Bucket) -> np.ndarray:
    """Decode with Pillow alone, as an independent reference: full decode, resize to cover, center crop."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    ratio = max(bucket.width / image.width, bucket.height / image.height)
    width, height = (math.floor(side * ratio + 0.5) for side in image.size)
    left, top = (width - bucket.width) // 2, (height - bucket.height) // 2
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(resized.crop((left, top, left + bucket.width, top + bucket.height)))


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / max(1e-9, ((a.astype(float) - b.astype(float)) ** 2).mean())))


@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([SMALL, LARGE, Bucket(96, 64), Bucket(448, 576)]))
def test_the_crop_is_inside_centred_and_as_large_as_possible(width: int, height: int, bucket: Bucket) -> None:
    at = place(width, height, bucket)
    assert at.scaled_width >= bucket.width and at.scaled_height >= bucket.height
    assert at.scaled_width == bucket.width or at.scaled_height == bucket.height
    # the image keeps its aspect ratio, up to half a pixel
    scale = max(bucket.width / width, bucket.height / height)
    assert abs(at.scaled_width - width * scale) <= 0.5 + 1e-6 and abs(at.scaled_height - height * scale) <= 0.5 + 1e-6
    right, below = at.scaled_width - bucket.width - at.left, at.scaled_height - bucket.height - at.top
    assert 0 <= right - at.left <= 1 and 0 <= below - at.top <= 1
    left, top, right_edge, bottom = at.box
    assert 0 <= left < right_edge <= width and 0 <= top < bottom <= height


@pytest.mark.parametrize("orientation", TURNS)
@settings(max_examples=25)
@given(st.integers(64, 300), st.integers(64, 300))
def test_a_turned_picture_is_cut_as_the_upright_one(orientation: int, width: int, height: int) -> None:
    """The crop of the stored image, turned upright with NumPy, equals the crop of the upright image."""
    upright = place(width, height, Bucket(64, 48))
    stored = upright.as_stored(*TURNS[orientation])
    grid = np.zeros((stored.scaled_height, stored.scaled_width), bool)
    grid[
        stored.top : stored.top + stored.bucket.height,
        stored.left : stored.left + stored.bucket.width,
    ] = True
    flip_x, flip_y, turned = TURNS[orientation]
    grid = grid[:: -1 if flip_y else 1, :: -1 if flip_x else 1]
    grid = grid.T if turned else grid
    assert grid.shape == (upright.scaled_height, upright.scaled_width)
    assert grid[upright.top : upright.top + 48, upright.left : upright.left + 64].all() and grid.sum() == 48 * 64


def test_each_bucket_that_it_covers_and_no_other() -> None:
    data = picture(np.random.default_rng(0), 100, 127)
    result = decode(data, [SMALL, LARGE], PixelsConfig(), LIMITS)
    assert list(result.pixels) == [SMALL]
    assert result.pixels[SMALL].shape == (64, 64, 3)
    assert (result.width, result.height, result.corners[SMALL]) == (100, 127, (13, 0))  # 8 of 81 rows at 64 px
    with pytest.raises(Reject, match="100x63") as caught:
        decode(picture(np.random.default_rng(0), 100, 63), [SMALL], PixelsConfig(), LIMITS)
    assert caught.value.reason == "too_small"


@pytest.mark.parametrize("size", [(128, 128), (129, 200), (300, 700), (641, 479), (2300, 1901)])
def test_the_filter_is_pillows(size: tuple[int, int]) -> None:
    """Results agree within two levels for any memory layout (above 16 MB, Pillow's memory is not contiguous)."""
    coarse = np.random.default_rng(1).integers(0, 256, (size[1] // 16, size[0] // 16, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    data = saved(image, "PNG", compress_level=1)
    for filter in ("bilinear", "bicubic", "lanczos"):
        result = decode(data, [SMALL, LARGE], PixelsConfig(resampling=filter), LIMITS)
        for bucket, pixels in result.pixels.items():
            resample = Image.Resampling[filter.upper()]
            expected = image.resize((bucket.width, bucket.height), resample, box=place(*size, bucket).box)
            assert np.abs(pixels.astype(int) - np.asarray(expected)).max() <= 2


@pytest.mark.parametrize("margin", [1.5, 2.0])
@pytest.mark.parametrize("size", [(801, 603), (641, 479), (300, 700), (515, 517)])
def test_scaled_decoding_is_close_to_the_full_one(size: tuple[int, int], margin: float) -> None:
    """Edges, texture and 1/f noise, at sizes that no decoder scale divides. A margin of 1 gave 37 dB here."""
    file = io.BytesIO()
    photograph(np.random.default_rng(2), *size).save(file, "JPEG", quality=90)
    config = PixelsConfig(decode_margin=margin)
    result = decode(file.getvalue(), [SMALL, LARGE], config, LIMITS)
    for bucket, pixels in result.pixels.items():
        assert psnr(pixels, decode_plain(file.getvalue(), bucket)) > 40
    assert config.decoder == f"pillow-scaled-{margin:g}"


@pytest.mark.parametrize(
    ("size", "options", "buckets", "scale"),
    [
        ((600, 400), {}, [LARGE], 2),  # 200 px for 128 px, which is 1.56 times as many
        ((600, 400), {"decode_margin": 1.6}, [LARGE], 1),
        ((600, 400), {}, [SMALL, LARGE], 2),
        ((600, 400), {}, [SMALL], 4),
        ((600, 400), {"scaled_decode": False}, [SMALL], 1),
        ((800, 400), {}, [SMALL], 4),
        ((400, 800), {}, [SMALL], 4),
        ((800, 768), {}, [SMALL], 8),  # exactly the margin
        ((800, 400), {"orientation": 6}, [Bucket(64, 128)], 4),
    ],
)
def test_the_decoder_leaves_the_margin(
    size: tuple[int, int], options: dict[str, Any], buckets: list[Bucket], scale: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, exif, options = [], Image.Exif(), dict(options)
    exif[0x0112] = options.pop("orientation", 1)
    load = Image.Image.load

    def observed(image: Image.Image) -> object:
        sizes.append(image.size)
        return load(image)

    monkeypatch.setattr(Image.Image, "load", observed)
    decode(saved(Image.new("RGB", size), "JPEG", exif=exif), buckets, PixelsConfig(**options), LIMITS)
    assert sizes[-1] == (size[0] // scale, size[1] // scale)


def test_many_threads_give_the_same_bytes_as_one() -> None:
    corpus = [picture(np.random.default_rng(i), 200 + 37 * i, 400 - 11 * i) for i in range(12)]

    def hashed(data: bytes) -> list[bytes]:
        result = decode(data, [SMALL, LARGE], PixelsConfig(), LIMITS)
        return [pixels.tobytes() for pixels in result.pixels.values()]

    alone = [hashed(data) for data in corpus]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(hashed, corpus * 5)) == alone * 5


def test_no_other_format_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow supports 43 formats, but BMP, ICO and PPM are not accepted here."""
    for format in ("BMP", "ICO", "PPM", "TGA", "PCX", "JPEG2000"):
        with pytest.raises(Reject) as caught:
            decode(saved(Image.new("RGB", (64, 64)), format), [SMALL], PixelsConfig(), LIMITS)
        assert caught.value.reason == "not_an_image"
    assert set(FORMATS) == {"JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF"}
    fewer = LIMITS.model_copy(update={"formats": ("PNG", "WEBP")})
    assert decode(saved(Image.new("RGB", (64, 64)), "PNG"), [SMALL], PixelsConfig(), fewer).width == 64
    with pytest.raises(Reject, match="cannot identify"):
        decode(saved(Image.new("RGB", (64, 64)), "JPEG"), [SMALL], PixelsConfig(), fewer)


@pytest.mark.parametrize(
    ("format", "orientation"),
    # formats differ only in where the orientation is stored, and in whether Pillow itself turns the image
    [*product(("JPEG", "PNG", "TIFF"), range(10)), ("WEBP", 6), ("AVIF", 6)],
)
def test_exif_orientation(format: str, orientation: int) -> None:
    """A turned image is decoded, measured and cropped as a viewer shows it; 0 and 9 mean nothing."""
    rng = np.random.default_rng(4)
    shown = np.asarray(Image.open(io.BytesIO(picture(rng, 101, 150, "PNG"))))
    transposed = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,  # the camera's turn is undone by the viewer's
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }.get(orientation)
    image = Image.fromarray(shown)
    stored = image if transposed is None else image.transpose(transposed)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"PNG": {}, "TIFF": {}, "WEBP": {"lossless": True}}.get(format, {"quality": 95})
    bucket = Bucket(64, 96)
    result = decode(saved(stored, format, exif=exif, **options), [bucket, LARGE], PixelsConfig(), LIMITS)
    assert (result.width, result.height) == (101, 150) and list(result.pixels) == [bucket]
    assert result.corners[bucket] == decode(saved(image), [bucket], PixelsConfig(), LIMITS).corners[bucket]
    assert psnr(result.pixels[bucket], decode_plain(saved(image), bucket)) > (40 if options == {} else 30)


@pytest.mark.parametrize("exif", [b"garbage bytes", bytes(16), b"II*", b"II*\0", b"ASCII\0\0\0"])
@pytest.mark.parametrize(
    ("format", "options"),
    # Pillow looks for the resolution of a JPEG in EXIF unless its header states one, and then suppresses the error
    [("JPEG", {}), ("JPEG", {"dpi": (72, 72)}), ("PNG", {}), ("WEBP", {})],
)
def test_malformed_exif_is_ignored(format: str, options: dict[str, Any], exif: bytes) -> None:
    image = Image.open(io.BytesIO(picture(np.random.default_rng(9), 96, 64, "PNG")))
    plain, malformed = (saved(image, format, **options, **more) for more in ({}, {"exif": b"Exif\0\0" + exif}))
    assert exif in malformed
    expected, found = (decode(data, [SMALL], PixelsConfig(), LIMITS) for data in (plain, malformed))
    assert np.array_equal(found.pixels[SMALL], expected.pixels[SMALL])
    assert (found.width, found.height, found.corners) == (96, 64, expected.corners)


def test_memory_errors_in_exif_are_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Image.Image) -> Image.Exif:
        raise MemoryError

    monkeypatch.setattr(Image.Image, "getexif", fail)
    with pytest.raises(MemoryError):
        decode(saved(Image.new("RGB", (64, 64))), [SMALL], PixelsConfig(), LIMITS)


def test_a_turned_jpeg_decoded_at_a_scale_that_does_not_divide_it() -> None:
    """At 1/4, the last column is a quarter full. After turning, it comes first."""
    image = Image.open(io.BytesIO(picture(np.random.default_rng(6), 801, 1203, "PNG")))
    exif = Image.Exif()
    exif[0x0112] = 3
    turned = saved(image.transpose(Image.Transpose.ROTATE_180), "JPEG", exif=exif, quality=95)
    pixels = decode(turned, [LARGE], PixelsConfig(decode_margin=1), LIMITS).pixels[LARGE]
    assert psnr(pixels, decode_plain(saved(image), LARGE)) > 40


@pytest.mark.parametrize(
    ("make", "reason"),  # functions, so that only one process makes the images
    [
        (lambda: b"", "not_an_image"),
        (lambda: b"<html><body>404</body></html>", "not_an_image"),
        (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n", "not_an_image"),
        (lambda: picture(np.random.default_rng(2), 200, 200, "PNG")[:-2000], "undecodable"),
        (lambda: picture(np.random.default_rng(2), 200, 200)[:-1000], "undecodable"),
        (lambda: saved(Image.new("1", (12_000, 12_000))), "too_many_pixels"),
        (lambda: saved(Image.new("1", (40_000, 64))), "too_many_pixels"),
    ],
    ids=["empty", "html", "postscript", "cut-png", "cut-jpeg", "bomb", "ribbon"],
)
def test_bad_pictures_are_rejected(make: Callable[[], bytes], reason: str) -> None:
    with pytest.raises(Reject) as caught:
        decode(make(), [SMALL], PixelsConfig(), LIMITS)
    assert caught.value.reason == reason


def test_an_image_may_reach_the_limits() -> None:
    limits = LimitsConfig(max_pixels=64 * 80, max_side=80)
    assert decode(saved(Image.new("RGB", (64, 80))), [SMALL], PixelsConfig(), limits).height == 80


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "AVIF", "TIFF"])
def test_first_frame_of_an_animation(format: str) -> None:
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue", "lime")]
    options = {"lossless": True} if format == "WEBP" else {}
    data = saved(frames[0], format, save_all=True, append_images=frames[1:], **options)
    first = decode(data, [SMALL], PixelsConfig(), LIMITS).pixels[SMALL]
    assert np.abs(first.astype(int) - (255, 0, 0)).max() <= 3


def test_a_phones_jpeg_of_several_pictures() -> None:
    """Pillow calls the format MPO. It is decoded at a scale like other JPEGs."""
    large = Image.open(io.BytesIO(picture(np.random.default_rng(7), 1200, 900)))
    data = saved(large, "MPO", save_all=True, append_images=[large.resize((160, 120))])
    assert data[:2] == b"\xff\xd8"
    result = decode(data, [LARGE], PixelsConfig(), LIMITS)
    assert (result.width, result.height) == (1200, 900)
    assert psnr(result.pixels[LARGE], decode_plain(data, LARGE)) > 40


def test_a_crop_whose_edges_round_outside_is_decoded() -> None:
    """For 450x579 into 448x576, plain arithmetic gives a left edge of -2.8e-14, which Pillow refuses."""
    bucket = Bucket(448, 576)
    data = saved(Image.new("RGB", (450, 579)))
    assert decode(data, [bucket], PixelsConfig(), LIMITS).pixels[bucket].shape == (576, 448, 3)


def test_running_out_of_memory_is_not_the_images_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def starve(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("precompute.pixels.decode.to_srgb", starve)
    with pytest.raises(MemoryError):
        decode(saved(Image.new("RGB", (64, 64))), [SMALL], PixelsConfig(), LIMITS)


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
def test_a_tiff_is_not_turned_by_its_xmp_after_its_size_was_read(compression: str | None) -> None:
    """Pillow would turn it while decoding, after the crop has been computed."""
    stripes = np.zeros((64, 128, 3), np.uint8)
    stripes[:, :32], stripes[:, 32:96], stripes[:, 96:] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    fields = TiffImagePlugin.ImageFileDirectory_v2()
    fields[700] = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    fields.tagtype[700] = 1
    file = io.BytesIO()
    Image.fromarray(stripes).save(file, "TIFF", tiffinfo=fields, compression=compression)
    bucket = Bucket(64, 64)
    picture = decode(file.getvalue(), [bucket], PixelsConfig(), LimitsConfig())
    assert (picture.width, picture.height) == (128, 64)
    assert (picture.pixels[bucket] == (0, 255, 0)).all()


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def png_with_xmp(image: Image.Image, is_last: bool) -> bytes:
    """Save a PNG whose XMP is before or after its pixels."""
    fields = PngImagePlugin.PngInfo()
    fields.add_itxt("XML:com.adobe.xmp", XMP.decode())
    data = saved(image, "PNG", pnginfo=fields)
    start = data.index(b"iTXt") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4])
    return data[:start] + data[end:-12] + data[start:end] + data[-12:] if is_last else data


@pytest.mark.parametrize(
    "save",
    [
        lambda image: saved(image, "JPEG", xmp=XMP),
        lambda image: saved(image, "WEBP", xmp=XMP),
        lambda image: saved(image, "AVIF", xmp=XMP),
        lambda image: png_with_xmp(image, is_last=False),
        lambda image: png_with_xmp(image, is_last=True),
    ],
    ids=["jpeg", "webp", "avif", "png", "png-last"],
)
def test_an_orientation_in_xmp_is_ignored(save: Callable[[Image.Image], bytes]) -> None:
    data = save(Image.new("RGB", (128, 64)))
    assert b'tiff:Orientation="6"' in data
    picture = decode(data, [Bucket(64, 64)], PixelsConfig(), LimitsConfig())
    assert (picture.width, picture.height) == (128, 64)
