"""Decode image bytes into one uint8 array per bucket.

The header is checked before anything is decoded, and one decode serves all buckets.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from PIL import Image
from PIL.ImageFile import ImageFile
from pydantic import Field

from precompute.input.reject import Reject
from precompute.pixels.blur import Box, blur, turned_boxes
from precompute.pixels.color import scale_transparency, to_srgb
from precompute.pixels.resample import Filter, place, resample
from shards.base.config import Config
from shards.format.buckets import AspectTable, Bucket, choose_buckets

Format = Literal["JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF"]
FORMATS: tuple[Format, ...] = get_args(Format)
"""The only formats that Pillow may open; it supports 43."""
SCALED_FORMATS = ("JPEG", "MPO")
"""Formats that can be decoded at a reduced size. MPO is Pillow's name for the multi-image JPEGs that phones write, of
which only the first image is used."""
ORIENTATION_TAG = 0x0112
# EXIF orientation → whether to flip left-right, flip top-bottom, and then transpose the stored image to make it upright
TURNS = {
    1: (False, False, False),
    2: (True, False, False),
    3: (True, True, False),
    4: (False, True, False),
    5: (False, False, True),
    6: (False, True, True),
    7: (True, True, True),
    8: (True, False, True),
}
Image.MAX_IMAGE_PIXELS = None  # `limits.max_pixels` replaces Pillow's check
MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class PixelsConfig(Config):
    """Decoding, cropping and resizing of images; recorded in encoding.json."""

    resampling: Filter = "bicubic"
    """Filter for antialiased resizing; lanczos is several times slower than the others."""
    crop: Literal["center"] = "center"
    """Part of the image that is kept if its aspect ratio differs from the bucket's."""
    scaled_decode: bool = True
    """Decode large JPEGs at 1/2, 1/4 or 1/8 of their size."""
    decode_margin: float = Field(1.5, ge=1)
    """Minimum ratio of each side of the image after scaled decoding to the same side of its largest bucket. A larger
    margin leaves more of the downscaling to the resize filter, which is of higher quality."""

    blur_boxes: str | None = None
    """Field of the JSON beside an image with boxes to blur, such as faces: a list of [left, top, right, bottom], as
    fractions of the image's width and height. A sample without this field is rejected."""

    @property
    def decoder(self) -> str:
        """Name of the decoder, as recorded in encoding.json."""
        name = f"pillow-scaled-{self.decode_margin:g}" if self.scaled_decode else "pillow"
        return f"{name}, {self.blur_boxes} blurred" if self.blur_boxes else name

    @property
    def resampler(self) -> str:
        """Name of the library that does the resizing, as recorded in encoding.json."""
        return "pillow" if self.resampling == "lanczos" else "torch"


class LimitsConfig(Config):
    """Limits on images and captions, and on the resources used to decode an image."""

    formats: tuple[Format, ...] = Field(FORMATS, min_length=1)
    """Accepted image formats, detected by magic bytes."""
    max_pixels: int = 100_000_000
    """Maximum width × height according to the header."""
    max_side: int = 30_000
    """Maximum side in pixels."""
    max_bytes: int = 64 << 20
    """Maximum size of a tar member."""
    max_caption_characters: int = Field(4096, ge=1)
    """Longer captions are truncated before tokenization. This limit is recorded in encoding.json, because it changes
    what is stored."""
    decode_seconds: int = Field(30, ge=1)
    """CPU time limit for decoding one image in a child process. Threads cannot be killed, so if decoding in a thread
    takes more than ten times this limit in wall-clock time, the attempt to encode the tar is abandoned, and the next
    attempt uses child processes."""
    decode_bytes: int = Field(8 << 30, ge=1 << 32)
    """Limit in bytes on the address space of a child process for decoding; torch takes 3 GB of it."""


@dataclass(frozen=True)
class Picture:
    """A decoded image, cropped and resized for each of its buckets."""

    width: int
    """Width of the upright original in pixels."""
    height: int
    """Height of the upright original in pixels."""
    pixels: dict[Bucket, np.ndarray]
    """Bucket → (height, width, 3) uint8."""
    corners: dict[Bucket, tuple[int, int]]
    """Bucket → (top, left) of the crop in original pixels."""


def decode(
    data: bytes,
    buckets: Sequence[Bucket],
    config: PixelsConfig,
    limits: LimitsConfig,
    aspects: Sequence[AspectTable] = (),
    boxes: Sequence[Box] = (),
) -> Picture:
    """Decode an image for each of `buckets` that it covers without upscaling, and also for one bucket from each aspect
    table.

    Args:
        boxes: parts of the image to blur. If the image has to be rotated to make it upright, it is unknown whether the
            boxes refer to the upright image or to the image as stored, so both are blurred.

    Raises:
        Reject: `not_an_image`, `too_many_pixels`, `too_small`, `bad_profile` or `undecodable`.
    """
    image = _open(data, limits)
    if not any(choose_buckets(*size, buckets, aspects) for size in (image.size, image.size[::-1])):
        raise Reject("too_small", f"{image.width}x{image.height}")
    with rejecting("undecodable"):
        flip_x, flip_y, turned = TURNS[_orientation(image)]
    width, height = image.size[::-1] if turned else image.size
    chosen = choose_buckets(width, height, buckets, aspects)
    if not chosen:
        raise Reject("too_small", f"{width}x{height}")
    placements = {bucket: place(width, height, bucket) for bucket in chosen}
    with rejecting("undecodable"):
        scale = _shrink_on_decode(image, chosen, turned, config)
        size = image.size
        image.load()
        if image.size != size:
            raise Reject(
                "undecodable", f"the header says {size[0]}x{size[1]}, but the image is {image.width}x{image.height}"
            )
        turns = (False, False, False), (flip_x, flip_y, turned)
        rgb = blur(to_srgb(image), [box for turn in dict.fromkeys(turns) for box in turned_boxes(boxes, *turn)])
        pixels = {}
        # crop and resize the image as stored, then rotate only the smaller result
        places = (placement.as_stored(flip_x, flip_y, turned) for placement in placements.values())
        for bucket, cut in zip(placements, resample(rgb, places, scale, config.resampling), strict=True):
            cut = cut[:: -1 if flip_y else 1, :: -1 if flip_x else 1]
            pixels[bucket] = np.ascontiguousarray(cut.swapaxes(0, 1) if turned else cut)
    return Picture(width, height, pixels, {bucket: at.corner for bucket, at in placements.items()})


@contextmanager
def rejecting(reason: str) -> Iterator[None]:
    """Convert any exception raised in the block, except MemoryError, to a Reject. Pillow's parsers raise a dozen types
    of exceptions."""
    try:
        yield
    except (MemoryError, Reject):
        raise
    except Exception as error:
        text = MEMORY_ADDRESS.sub("", f"{type(error).__name__}: {error}")  # rejects must be identical in every run
        raise Reject(reason, text[:200]) from error


def _open(data: bytes, limits: LimitsConfig) -> ImageFile:
    with rejecting("not_an_image"):
        image = Image.open(io.BytesIO(data), formats=limits.formats)
    if image.width * image.height > limits.max_pixels or max(image.size) > limits.max_side:
        raise Reject("too_many_pixels", f"{image.width}x{image.height}")
    if image.format == "TIFF":
        image.info.pop("xmp", None)  # otherwise Pillow applies the XMP orientation, but only in load()
    with rejecting("undecodable"):
        scale_transparency(image)
    return image


def _orientation(image: Image.Image) -> int:
    # Pillow rotates TIFFs itself, and the size that it reports is already the rotated one
    orientation = 1 if image.format == "TIFF" else image.getexif().get(ORIENTATION_TAG, 1)
    return orientation if orientation in TURNS else 1


def _shrink_on_decode(image: Image.Image, buckets: list[Bucket], turned: bool, config: PixelsConfig) -> int:
    """Make Pillow decode a JPEG at 1/scale of its size, with the largest scale that `decode_margin` allows, and return
    the scale. It is 1 for other formats."""
    if not config.scaled_decode or image.format not in SCALED_FORMATS:
        return 1
    width, height = image.size[::-1] if turned else image.size
    spare = min(min(width / bucket.width, height / bucket.height) for bucket in buckets) / config.decode_margin
    scale = max((scale for scale in (2, 4, 8) if scale <= spare), default=1)
    image.draft(None, (image.width // scale, image.height // scale))
    return scale
