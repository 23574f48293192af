"""Convert decoded images to 8-bit sRGB without alpha. This covers sample depths, palettes, CMYK, ICC profiles and
transparency."""

import functools
import io
import itertools

import numpy as np
from PIL import Image, ImageChops, ImageCms
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, TiffImageFile

from precompute.input.reject import Reject

SRGB_TOLERANCE = 2
"""A profile counts as sRGB if it changes no channel of any colour by more than this many levels (of 255). Common sRGB
profiles differ by 1."""
ALPHA_MODES = ("RGBA", "LA", "PA", "La", "RGBa")
WHITE_IS_ZERO = 0
MAX_PROFILE_BYTES = 4 << 20
"""Maximum size of an ICC profile. Profiles are cached, so a larger limit would cost memory."""
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


def scale_transparency(image: ImageFile) -> None:
    """Scale the transparent colour of a PNG to 8 bits before the image is loaded, because Pillow scales only the
    samples.

    In 16-bit RGB images, all colours that equal the transparent colour after scaling to 8 bits become transparent.
    """
    clear = image.info.get("transparency")
    if image.format != "PNG" or clear is None:
        return
    samples = image.tile[0].args
    if samples in ("L;2", "L;4") and isinstance(clear, int):
        image.info["transparency"] = clear * (85 if samples == "L;2" else 17)
    elif samples == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in clear)


def to_srgb(image: Image.Image) -> Image.Image:
    """Convert a loaded image to sRGB using its embedded profile, and composite transparent pixels over white.

    A profile for a different colour space is ignored, as in browsers; for example, an image that was converted to RGB
    may still contain its old CMYK profile. The only exception is an RGB profile in a greyscale image, which is used.

    Raises:
        Reject: `bad_profile` if the profile cannot be read; `undecodable` if the value range of the samples is unknown.
    """
    profile = image.info.get("icc_profile")
    if profile and len(profile) > MAX_PROFILE_BYTES:
        raise Reject("bad_profile", f"the ICC profile has {len(profile)} bytes, more than {MAX_PROFILE_BYTES}")
    if image.mode == "RGB" and not profile and "transparency" not in image.info:
        return image
    if image.mode in ("I", "F"):
        raise Reject("undecodable", f"mode {image.mode}: 32-bit samples have no standard value range")
    if image.mode.startswith("I;16"):
        image = _eight_bit_grey(image)
    if image.mode == "CMYK" and image.format == "JPEG" and "adobe" not in image.info:
        # Pillow assumes that every CMYK JPEG was written by Adobe software, which inverts CMYK
        image = ImageChops.invert(image)
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
    assert converted is not None, "only in-place calls return None"
    return converted


@functools.lru_cache(maxsize=64)
def color_space(profile: bytes) -> str:
    """Return the colour space of an ICC profile, such as `RGB`, `GRAY` or `CMYK`, or raise Reject (`bad_profile`)."""
    return _open(profile).profile.xcolor_space.strip()


@functools.lru_cache(maxsize=64)
def srgb_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the transform from this profile and `mode` (`L`, `RGB` or `CMYK`) to sRGB, or None if it would not visibly
    change any colour. Raises Reject (`bad_profile`) if the transform cannot be built. Building one takes milliseconds,
    so transforms are cached and shared by all threads."""
    try:
        # exact values for all 256 greys: LittleCMS's optimisation uses a 33-entry table, which is off by up to 10
        # levels for dark greys
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
        raise Reject("bad_profile", f"the ICC profile of {len(profile)} bytes cannot be read: {error}") from error


def _probe(mode: str) -> Image.Image:
    """Return a test image: all 256 greys for mode `L`, or a grid of 18³ colours for `RGB`."""
    if mode == "L":
        return Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    grid = np.array(list(itertools.product(range(0, 256, 15), repeat=3)), np.uint8)  # 0, 15, …, 255
    return Image.fromarray(grid[None])
