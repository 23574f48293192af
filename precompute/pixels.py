"""Picture bytes → one uint8 array per bucket. The header is judged first; one decode serves all buckets."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, ImageOps
from pydantic import Field

from shards.buckets import Bucket
from shards.config import Config

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF")
ORIENTATION_TAG = 0x0112
Image.MAX_IMAGE_PIXELS = None  # `limits` decides, on the header
MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Reject(Exception):
    """A sample that will not be encoded: its reason, one word for counting, and the detail for a person."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason

    def __reduce__(self) -> tuple[type["Reject"], tuple[str, str]]:
        return Reject, (self.reason, str(self))  # as it crosses from a child process


class PixelsConfig(Config):
    """How pictures become pixels; all of it is in encoding.json."""

    resampling: Literal["bilinear", "bicubic", "lanczos"] = "bicubic"
    """Filter of the resize; Pillow's, which antialiases."""
    crop: Literal["center"] = "center"
    """Which part of a picture of another shape is kept."""
    scaled_decode: bool = True
    """Decode large JPEGs at 1/2, 1/4 or 1/8, never below twice the largest bucket they go to."""

    @property
    def decoder(self) -> str:
        """The decoder's name for encoding.json."""
        return "pillow-scaled" if self.scaled_decode else "pillow"


class LimitsConfig(Config):
    """What is refused before decoding, or cut, and what decoding may take in a child process."""

    max_pixels: int = 100_000_000
    """Width × height by the header."""
    max_side: int = 30_000
    """Pixels."""
    max_bytes: int = 64 << 20
    """Of one tar member."""
    max_caption_characters: int = Field(4096, ge=1)
    """A longer caption is cut here, before the tokenizer; in encoding.json, since it changes what is stored."""
    decode_seconds: int = Field(30, ge=1)
    """Processor time for one picture. A thread cannot be ended: where one takes ten times as long, by the clock, the
    attempt at the shard is given up, and the next one decodes in child processes."""
    decode_bytes: int = Field(8 << 30, ge=1 << 29)
    """Address space of a child process that decodes."""


@dataclass(frozen=True)
class Picture:
    """One picture, cut and scaled for each bucket it is large enough for."""

    width: int
    height: int
    """Of the upright original, in pixels."""
    pixels: dict[Bucket, np.ndarray]
    """Bucket → (height, width, 3) uint8."""
    corners: dict[Bucket, tuple[int, int]]
    """Bucket → crop's (top, left) in original pixels."""


def decode(data: bytes, buckets: list[Bucket], config: PixelsConfig, limits: LimitsConfig) -> Picture:
    """Decode a picture for every bucket that it covers without being enlarged.

    Raises:
        Reject: `not_an_image`, `too_many_pixels`, `too_small` or `undecodable`.
    """
    image = _open(data, limits)
    if not any(bucket.fits(*size) for bucket in buckets for size in (image.size, image.size[::-1])):
        raise Reject("too_small", f"{image.width}x{image.height}")
    with rejecting("undecodable"):
        turned = image.getexif().get(ORIENTATION_TAG, 1) in (5, 6, 7, 8)
    width, height = (image.height, image.width) if turned else image.size
    fitting = [bucket for bucket in buckets if bucket.fits(width, height)]
    if not fitting:
        raise Reject("too_small", f"{width}x{height}")
    with rejecting("undecodable"):
        if config.scaled_decode and image.format == "JPEG":
            _shrink_on_decode(image, fitting, turned)
        rgb = _upright_rgb(image)
    boxes = {bucket: crop_box(width, height, bucket) for bucket in fitting}
    scale_x, scale_y = rgb.width / width, rgb.height / height
    resample = Image.Resampling[config.resampling.upper()]
    pixels = {}
    for bucket, (left, top, right, bottom) in boxes.items():
        box = (left * scale_x, top * scale_y, min(right * scale_x, rgb.width), min(bottom * scale_y, rgb.height))
        pixels[bucket] = np.asarray(rgb.resize((bucket.width, bucket.height), resample, box=box))
    return Picture(width, height, pixels, {bucket: (round(box[1]), round(box[0])) for bucket, box in boxes.items()})


def crop_box(width: int, height: int, bucket: Bucket) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of the largest centred part of a width × height picture with the bucket's aspect."""
    scale = min(width / bucket.width, height / bucket.height)
    # rounding may put an edge a hair outside, which Pillow refuses
    left = max(0.0, (width - bucket.width * scale) / 2)
    top = max(0.0, (height - bucket.height * scale) / 2)
    return left, top, min(width, left + bucket.width * scale), min(height, top + bucket.height * scale)


@contextmanager
def rejecting(reason: str) -> Iterator[None]:
    """Any exception inside is the sample's fault (Pillow's parsers raise a dozen kinds), but for want of memory."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        text = MEMORY_ADDRESS.sub("", f"{type(error).__name__}: {error}")  # rejects are the same in every run
        raise Reject(reason, text[:200]) from error


def _open(data: bytes, limits: LimitsConfig) -> Image.Image:
    with rejecting("not_an_image"):
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    if image.width * image.height > limits.max_pixels or max(image.size) > limits.max_side:
        raise Reject("too_many_pixels", f"{image.width}x{image.height}")
    return image


def _shrink_on_decode(image: Image.Image, buckets: list[Bucket], turned: bool) -> None:
    # A factor of two is left for the resize, whose filter is better than the decoder's.
    width = 2 * max(bucket.height if turned else bucket.width for bucket in buckets)
    height = 2 * max(bucket.width if turned else bucket.height for bucket in buckets)
    image.draft(None, (width, height))


def _upright_rgb(image: Image.Image) -> Image.Image:
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        image = _sixteen_bit_to_grey(image)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _sixteen_bit_to_grey(image: Image.Image) -> Image.Image:
    values = np.asarray(image.convert("I") if image.mode != "F" else image, dtype=np.float64)
    return Image.fromarray(np.clip(values / 257.0, 0, 255).round().astype(np.uint8))
