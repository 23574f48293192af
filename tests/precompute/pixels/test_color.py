"""Conversion to sRGB over white, compared with plain arithmetic or with LittleCMS."""

import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, ImageCms

from precompute.input.reject import Reject
from precompute.pixels.color import SRGB_TOLERANCE, srgb_transform
from precompute.pixels.decode import LimitsConfig, PixelsConfig, decode
from shards.format.buckets import Bucket
from tests.faults.images import chunk, png, tiff
from tests.precompute.pixels import icc
from tests.tiny import saved

SIDE = 64
BUCKET = Bucket(SIDE, SIDE)
RNG = np.random.default_rng(0)
COLORS = RNG.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
GREYS = COLORS[..., 0]
ALPHA = RNG.integers(0, 256, (SIDE, SIDE), dtype=np.uint8)


def decoded(data: bytes) -> np.ndarray:
    """Decode to (64, 64, 3) without resizing."""
    return decode(data, [BUCKET], PixelsConfig(), LimitsConfig()).pixels[BUCKET].astype(float)


def over_white(colors: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[..., None] / 255.0
    return colors * share + 255 * (1 - share)


def three(greys: np.ndarray) -> np.ndarray:
    return np.repeat(greys[..., None].astype(float), 3, axis=-1)


def assert_close(found: np.ndarray, expected: np.ndarray, levels: float) -> None:
    assert np.abs(found - expected).max() <= levels


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
def test_plain_colours_and_greys(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    assert_close(decoded(saved(Image.fromarray(COLORS), format, **options)), COLORS, 0)
    assert_close(decoded(saved(Image.fromarray(GREYS), format, **options)), three(GREYS), 0)


def test_avif() -> None:
    smooth = np.asarray(Image.fromarray(COLORS[:4, :4]).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    assert np.abs(decoded(saved(Image.fromarray(smooth), "AVIF", quality=100, subsampling="4:4:4")) - smooth).mean() < 1


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bit_grey(format: str) -> None:
    values = RNG.integers(0, 65536, (SIDE, SIDE), dtype=np.uint16)
    assert_close(decoded(saved(Image.fromarray(values), format)), three(values / 257.0), 0.5001)


def png_of(values: np.ndarray, color_type: int, *chunks: bytes) -> bytes:
    """Encode (height, width[, channels]) uint16 as a 16-bit PNG."""
    rows = values.astype(">u2").reshape(len(values), -1)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return png(values.shape[1], len(values), body, *chunks, depth=16, colour=color_type)


def test_sixteen_bit_colour_and_alpha() -> None:
    """Pillow keeps the high byte of 16 bits, which is at most one level off."""
    colors = RNG.integers(0, 65536, (SIDE, SIDE, 3), dtype=np.uint16)
    assert_close(decoded(png_of(colors, 2)), colors / 257.0, 1.01)
    alpha = RNG.integers(0, 65536, (SIDE, SIDE), dtype=np.uint16)
    rgba = np.concatenate([colors, alpha[..., None]], axis=-1)
    assert_close(decoded(png_of(rgba, 6)), over_white(colors / 257.0, alpha / 257.0), 2.01)
    grey_alpha = np.stack([colors[..., 0], alpha], axis=-1)
    expected = over_white(three(colors[..., 0] / 257.0), alpha / 257.0)
    assert_close(decoded(png_of(grey_alpha, 4)), expected, 2.01)


def test_sixteen_bit_grey_with_a_transparent_value() -> None:
    values = RNG.integers(0, 4, (SIDE, SIDE), dtype=np.uint16) * 10_000
    expected = np.where(values == 20_000, 255, (values / 257.0).round())
    assert_close(decoded(png_of(values, 0, chunk(b"tRNS", b"\x4e\x20"))), three(expected), 0)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_samples_of_unknown_range_are_rejected(mode: str) -> None:
    with pytest.raises(Reject, match="32-bit samples") as caught:
        decoded(saved(Image.new(mode, (SIDE, SIDE)), "TIFF"))
    assert caught.value.reason == "undecodable"


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
def test_transparency_over_white(format: str) -> None:
    rgba = Image.fromarray(np.concatenate([COLORS, ALPHA[..., None]], axis=-1))
    options = {"lossless": True, "exact": True} if format == "WEBP" else {}
    assert_close(decoded(saved(rgba, format, **options)), over_white(COLORS, ALPHA), 1)


def test_grey_transparency_over_white() -> None:
    image = Image.merge("LA", (Image.fromarray(GREYS), Image.fromarray(ALPHA)))
    assert_close(decoded(saved(image, "PNG")), over_white(three(GREYS), ALPHA), 1)


def test_palettes_and_their_transparency() -> None:
    image = Image.fromarray(COLORS).quantize(16)
    colors = np.asarray(image.convert("RGB"), float)
    for format in ("PNG", "GIF"):
        assert_close(decoded(saved(image, format)), colors, 0)
    hidden = np.asarray(image) == 5
    for format in ("PNG", "GIF"):
        found = decoded(saved(image, format, transparency=5))
        assert_close(found, np.where(hidden[..., None], 255, colors), 0)
    table = bytes(range(0, 256, 16))  # opacity of each of 16 colours
    expected = over_white(colors, np.asarray(image).astype(float) * 16)
    assert_close(decoded(saved(image, "PNG", transparency=table)), expected, 1)


def test_a_transparent_colour() -> None:
    values = (COLORS // 128 * 200).astype(np.uint8)
    expected = np.where((values == (200, 0, 0)).all(axis=-1)[..., None], 255, values)
    assert_close(decoded(saved(Image.fromarray(values), "PNG", transparency=(200, 0, 0))), expected, 0)
    greys = values[..., 0]
    found = decoded(saved(Image.fromarray(greys), "PNG", transparency=200))
    assert_close(found, three(np.where(greys == 200, 255, greys)), 0)


def test_one_bit() -> None:
    assert_close(decoded(saved(Image.fromarray(GREYS > 128))), three(255 * (GREYS > 128)), 0)


def without_adobe_marker(data: bytes) -> bytes:
    start = data.index(b"\xff\xee")
    return data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4], "big") :]


@pytest.mark.parametrize("adobe", [True, False])
def test_cmyk_jpegs(adobe: bool) -> None:
    """Photoshop stores inverted inks and marks such files; files without the marker are not inverted."""
    inks = np.asarray(Image.fromarray(RNG.integers(0, 256, (2, 2, 4), np.uint8), "CMYK").resize((SIDE, SIDE), 3))
    data = saved(Image.fromarray(inks, "CMYK"), "JPEG", quality=100, subsampling=0)
    if not adobe:
        data, inks = without_adobe_marker(data), 255 - inks
    cyan_magenta_yellow, black = inks[..., :3].astype(float), inks[..., 3:].astype(float)
    expected = (255 - cyan_magenta_yellow) * (255 - black) / 255
    assert np.abs(decoded(data) - expected).mean() < 2


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"])
def test_an_rgb_profile_is_applied(format: str) -> None:
    """Adobe RGB in any container, compared with its definition and with LittleCMS on the full image."""
    profile = icc.rgb_profile(icc.ADOBE_RGB, 2.2)
    smooth = np.asarray(Image.fromarray(COLORS[:3, :3]).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    exact: dict[str, dict[str, object]] = {
        "WEBP": {"lossless": True},
        "JPEG": {"quality": 100, "subsampling": 0},
        "AVIF": {"quality": 100},
    }
    data = saved(Image.fromarray(smooth), format, icc_profile=profile, **exact.get(format, {}))
    stored = Image.open(io.BytesIO(data)).convert("RGB")
    found = decoded(data)
    assert_close(found, icc.to_srgb(np.asarray(stored, float), icc.ADOBE_RGB, 2.2), 2)
    plain = ImageCms.profileToProfile(
        stored, ImageCms.getOpenProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB"), outputMode="RGB"
    )
    assert_close(found, np.asarray(plain, float), 0)
    assert np.abs(found - np.asarray(stored)).max() > 10


def test_a_profile_reaches_palettes_transparent_pictures_and_greys() -> None:
    profile = icc.rgb_profile(icc.ADOBE_RGB, 1.8)
    palette = Image.fromarray(COLORS).quantize(16)
    colors = np.asarray(palette.convert("RGB"), float)
    found = decoded(saved(palette, "PNG", icc_profile=profile))
    assert_close(found, icc.to_srgb(colors, icc.ADOBE_RGB, 1.8), 2)
    rgba = Image.fromarray(np.concatenate([COLORS, ALPHA[..., None]], axis=-1))
    expected = over_white(icc.to_srgb(COLORS.astype(float), icc.ADOBE_RGB, 1.8), ALPHA)
    assert_close(decoded(saved(rgba, "PNG", icc_profile=profile)), expected, 3)
    expected = icc.to_srgb(three(GREYS), icc.ADOBE_RGB, 1.8)
    assert_close(decoded(saved(Image.fromarray(GREYS), "PNG", icc_profile=profile)), expected, 2)


@pytest.mark.parametrize("gamma", [1.0, 2.2])
def test_a_grey_profile(gamma: float) -> None:
    """Gamma 1 is linear light."""
    found = decoded(saved(Image.fromarray(GREYS), "PNG", icc_profile=icc.grey_profile(gamma)))
    assert_close(found, three(255 * icc.encode_srgb((GREYS / 255.0) ** gamma)), 1)


def test_a_cmyk_profile() -> None:
    profile = icc.cmyk_profile()
    inks = Image.fromarray(RNG.integers(0, 256, (2, 2, 4), np.uint8), "CMYK").resize((SIDE, SIDE), 3)
    data = saved(inks, "JPEG", quality=100, subsampling=0, icc_profile=profile)
    stored = Image.open(io.BytesIO(data))
    stored.load()
    plain = ImageCms.profileToProfile(
        stored, ImageCms.getOpenProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB"), outputMode="RGB"
    )
    found = decoded(data)
    assert_close(found, np.asarray(plain, float), 0)
    assert np.abs(found - np.asarray(stored.convert("RGB"))).mean() > 10
    # grey by construction, and lighter where there is less ink
    assert np.abs(found - found.mean(axis=-1, keepdims=True)).max() <= 3
    ink = (np.asarray(stored) @ np.array([0.3, 0.2, 0.1, 0.4])).ravel()
    assert np.corrcoef(ink, found[..., 0].ravel())[0, 1] < -0.98


def test_srgb_itself_changes_nothing() -> None:
    """LittleCMS's own sRGB profile is skipped because of its effect, not its name."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert srgb_transform(profile, "RGB") is None
    assert_close(decoded(saved(Image.fromarray(COLORS), "PNG", icc_profile=profile)), COLORS, 0)
    moved = icc.to_srgb(COLORS.astype(float), icc.SRGB, 2.2) - COLORS
    assert np.abs(moved).max() > SRGB_TOLERANCE
    assert srgb_transform(icc.rgb_profile(icc.SRGB, 2.2), "RGB") is not None  # differs for dark colours


def test_a_grey_profile_with_the_curve_of_srgb_changes_nothing() -> None:
    levels = np.linspace(0, 1, 1024)
    linear = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
    curve = b"curv\0\0\0\0" + struct.pack(">I1024H", 1024, *(65535 * linear).round().astype(int).tolist())
    profile = icc.make_profile(b"GRAY", {b"kTRC": curve})
    assert_close(decoded(saved(Image.fromarray(GREYS), "PNG", icc_profile=profile)), three(GREYS), 0)


def test_a_profile_of_a_different_colour_space_is_ignored() -> None:
    for profile in (icc.cmyk_profile(), icc.grey_profile(1.0)):
        assert_close(decoded(saved(Image.fromarray(COLORS), "PNG", icc_profile=profile)), COLORS, 0)


@pytest.mark.parametrize("cut", [200, 130, 40, 1])
def test_a_profile_that_cannot_be_read_rejects_the_picture(cut: int) -> None:
    profile = icc.rgb_profile(icc.ADOBE_RGB, 2.2)
    with pytest.raises(Reject) as caught:
        decoded(saved(Image.fromarray(COLORS), "TIFF", icc_profile=profile[:cut]))
    assert caught.value.reason == "bad_profile"


def test_threads_share_a_transform() -> None:
    srgb_transform.cache_clear()
    data = [
        saved(Image.fromarray(RNG.integers(0, 256, (SIDE, SIDE, 3), np.uint8)), icc_profile=profile)
        for profile in (icc.rgb_profile(icc.ADOBE_RGB, 2.2), icc.rgb_profile(icc.SRGB, 1.8))
        for _ in range(4)
    ]
    alone = [decoded(each).tobytes() for each in data]
    srgb_transform.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda each: decoded(each).tobytes(), data * 20)) == alone * 20
    assert srgb_transform.cache_info().currsize == 2


@pytest.mark.parametrize(("depth", "value"), [(1, 0), (1, 1), (2, 1), (4, 7), (8, 7)])
def test_the_transparent_grey_of_a_png_of_any_depth(depth: int, value: int) -> None:
    def grey(clear: int) -> np.ndarray:
        samples = sum(value << depth * place for place in range(8 // depth))
        rows = (b"\0" + bytes([samples]) * (SIDE * depth // 8)) * SIDE
        return decoded(png(SIDE, SIDE, zlib.compress(rows), chunk(b"tRNS", struct.pack(">H", clear)), depth=depth))

    assert_close(grey(value), np.full((SIDE, SIDE, 3), 255.0), 0)
    opaque = value * 255 / (2**depth - 1)
    assert_close(grey(value ^ 1), np.full((SIDE, SIDE, 3), opaque), 0)


@pytest.mark.parametrize(("color", "expected"), [(0x1234, 255), (0x3400, 0x34)])
def test_the_transparent_color_of_a_16_bit_png(color: int, expected: int) -> None:
    rows = (b"\0" + struct.pack(">HHH", color, color, color) * SIDE) * SIDE
    clear = chunk(b"tRNS", struct.pack(">HHH", 0x1234, 0x1234, 0x1234))
    found = decoded(png(SIDE, SIDE, zlib.compress(rows), clear, depth=16, colour=2))
    assert_close(found, np.full((SIDE, SIDE, 3), float(expected)), 1)


@pytest.mark.parametrize(("bits", "photometric", "expected"), [(12, 1, 128), (16, 1, 192), (16, 0, 63)])
def test_grey_tiffs_of_more_than_8_bits(bits: int, photometric: int, expected: int) -> None:
    """Half of the 12-bit range, three quarters of the 16-bit range; photometric 0 means that zero is white."""
    data = b"\x80\x08\x00" * (SIDE * SIDE // 2) if bits == 12 else struct.pack("<H", 0xC040) * SIDE * SIDE
    place = 8 + 2 + 8 * 12 + 4
    entries = [(256, SIDE), (257, SIDE), (258, bits), (259, 1), (262, photometric), (273, place), (278, SIDE)]
    wide = (256, 257, 273, 278, 279)
    fields = [(tag, 4 if tag in wide else 3, 1, value) for tag, value in (*entries, (279, len(data)))]
    assert_close(decoded(tiff(*fields, data=data)), np.full((SIDE, SIDE, 3), float(expected)), 0)


def test_a_profile_too_large_to_keep_is_refused() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes() + bytes(4 << 20)
    with pytest.raises(Reject, match="bytes") as refused:
        decoded(saved(Image.fromarray(COLORS), "TIFF", icc_profile=profile))
    assert refused.value.reason == "bad_profile"
    assert_close(decoded(saved(Image.fromarray(COLORS), "TIFF", icc_profile=profile[: 4 << 20])), COLORS, 0)
