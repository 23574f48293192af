"""Whatever a file holds → 8-bit sRGB without transparency: sample depths, palettes, CMYK, ICC profiles, alpha."""

import functools
import io
import itertools

import numpy as np
from PIL import Image, ImageChops, ImageCms
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, TiffImageFile

from precompute.input.reject import Reject

SRGB_TOLERANCE = 2
"""A profile that moves no colour further than this, of 255, is sRGB: the profiles called so differ by 1."""
ALPHA_MODES = ("RGBA", "LA", "PA", "La", "RGBa")
WHITE_IS_ZERO = 0
MAX_PROFILE_BYTES = 4 << 20
"""Of an ICC profile; some are kept."""
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


def scale_transparency(image: ImageFile) -> None:
    """Bring the transparent colour of a PNG that is not loaded yet to 8 bits, as its samples will be: Pillow leaves it
    as the file has it. Of RGB with 16 bits, colours that are the same in 8 bits become transparent together."""
    clear = image.info.get("transparency")
    if image.format != "PNG" or clear is None:
        return
    samples = image.tile[0].args
    if samples in ("L;2", "L;4") and isinstance(clear, int):
        image.info["transparency"] = clear * (85 if samples == "L;2" else 17)
    elif samples == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in clear)


def to_srgb(image: Image.Image) -> Image.Image:
    """A loaded picture as RGB: colours by its embedded profile, transparency over white.

    A profile of another colour space than the picture's says nothing about it, and is passed over, as browsers do: a
    CMYK profile left in a picture that became RGB, for one. A grey picture may carry an RGB profile.

    Raises:
        Reject: `bad_profile` where the profile cannot be read; `undecodable` where the samples' range is not known.
    """
    profile = image.info.get("icc_profile")
    if profile and len(profile) > MAX_PROFILE_BYTES:
        raise Reject("bad_profile", f"{len(profile)} bytes")
    if image.mode == "RGB" and not profile and "transparency" not in image.info:
        return image
    if image.mode in ("I", "F"):
        raise Reject("undecodable", f"mode {image.mode}: 32-bit samples have no agreed range")
    if image.mode.startswith("I;16"):
        image = _eight_bit_grey(image)
    if image.mode == "CMYK" and image.format == "JPEG" and "adobe" not in image.info:
        image = ImageChops.invert(image)  # Pillow takes every CMYK JPEG for Adobe's, which are stored inverted
    alpha = None
    if image.mode in ALPHA_MODES or "transparency" in image.info:
        rgba = image.convert("RGBA")
        alpha, image = rgba.getchannel("A"), rgba.convert("L" if image.mode in ("L", "LA", "La") else "RGB")
    elif image.mode not in ("L", "CMYK", "RGB"):
        image = image.convert("RGB")
    color = _apply_profile(image, profile) if profile else image.convert("RGB")
    if alpha is None:
        return color
    # c·a + 255·(1 − a), rounded
    return Image.composite(color, Image.new("RGB", color.size, "white"), alpha)


def _eight_bit_grey(image: Image.Image) -> Image.Image:
    values: np.ndarray = np.asarray(image).astype(np.uint32)
    if isinstance(image, TiffImageFile):
        bits = image.tag_v2.get(BITSPERSAMPLE)
        if bits in (12, (12,)):
            values = values * 65535 // 4095
        if image.tag_v2.get(PHOTOMETRIC_INTERPRETATION) == WHITE_IS_ZERO:
            values = 65535 - values
    grey = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if (clear := image.info.get("transparency")) is not None:
        grey.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return grey


def _apply_profile(image: Image.Image, profile: bytes) -> Image.Image:
    space = color_space(profile)
    if image.mode == "L" and space == "RGB":
        image = image.convert("RGB")
    if {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}[image.mode] != space:
        return image.convert("RGB")
    transform = srgb_transform(profile, image.mode)
    if transform is None:
        return image.convert("RGB") if image.mode != "RGB" else image
    converted = ImageCms.applyTransform(image, transform)
    assert converted is not None  # only in-place calls return None
    return converted


@functools.lru_cache(maxsize=64)
def color_space(profile: bytes) -> str:
    """`RGB`, `GRAY`, `CMYK` or another one's name.

    Raises:
        Reject: `bad_profile`.
    """
    return _open(profile).profile.xcolor_space.strip()


@functools.lru_cache(maxsize=64)
def srgb_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """What takes `mode` (L, RGB or CMYK) pixels of this profile to sRGB; None where that changes nothing to speak of.

    Threads may share it. Building one takes milliseconds, so they are kept by the profile's bytes.

    Raises:
        Reject: `bad_profile`.
    """
    try:
        # greys by 256 exact values: LittleCMS's short cut is a table of 33, which misses dark ones by 10 levels
        flags = ImageCms.Flags.NOOPTIMIZE if mode == "L" else ImageCms.Flags.NONE
        transform = ImageCms.buildTransform(_open(profile), SRGB, mode, "RGB", ImageCms.Intent.PERCEPTUAL, flags)
    except ImageCms.PyCMSError as error:
        raise Reject("bad_profile", str(error)) from error
    if mode == "CMYK":
        return transform
    probe = _probe(mode)
    moved = np.asarray(ImageCms.applyTransform(probe, transform)).astype(int) - np.asarray(probe.convert("RGB"))
    return transform if np.abs(moved).max() > SRGB_TOLERANCE else None


def _open(profile: bytes) -> ImageCms.ImageCmsProfile:
    try:
        return ImageCms.getOpenProfile(io.BytesIO(profile))
    except (ImageCms.PyCMSError, OSError) as error:
        raise Reject("bad_profile", f"{len(profile)} bytes: {error}") from error


def _probe(mode: str) -> Image.Image:
    """All greys, or a grid of 18³ colours."""
    if mode == "L":
        return Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    grid = np.array(list(itertools.product(range(0, 256, 15), repeat=3)), np.uint8)  # 0, 15, …, 255
    return Image.fromarray(grid[None])
