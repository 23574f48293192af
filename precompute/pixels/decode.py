"""Decode image bytes into one uint8 array per bucket.

The header is checked before anything is decoded, and one decode serves all buckets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image
from pydantic import Field

from precompute.input.reject import Reject
from precompute.pixels.blur import Box, blur, turned_boxes
from precompute.pixels.color import to_srgb
from precompute.pixels.opening import (
    FORMATS,
    MAX_PIXELS,
    MAX_SIDE,
    TURNS,
    Format,
    open_image,
    rejecting,
    turns_of,
)
from precompute.pixels.resample import Filter, place, resample
from shards.base.config import Config
from shards.format.buckets import AspectTable, Bucket, choose_buckets

SCALED_FORMATS = ("JPEG", "MPO")
"""Formats that can be decoded at a reduced size. MPO is Pillow's name for the multi-image JPEGs that phones write, of
which only the first image is used."""


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
    max_pixels: int = MAX_PIXELS
    """Maximum width × height according to the header."""
    max_side: int = MAX_SIDE
    """Maximum side in pixels."""
    max_bytes: int = 64 << 20
    """Maximum size of an image file, and of the caption and JSON files beside it."""
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
    image = open_image(data, limits.formats, limits.max_pixels, limits.max_side)
    if not any(choose_buckets(*size, buckets, aspects) for size in (image.size, image.size[::-1])):
        raise Reject("too_small", f"{image.width}x{image.height}")
    (flip_x, flip_y, turned), box_turns = turns_of(image)
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
        both = dict.fromkeys((TURNS[1], box_turns))
        rgb = blur(to_srgb(image), [box for turns in both for box in turned_boxes(boxes, *turns)])
        pixels = {}
        # crop and resize the image as stored, then rotate only the smaller result
        places = (placement.as_stored(flip_x, flip_y, turned) for placement in placements.values())
        for bucket, cut in zip(placements, resample(rgb, places, scale, config.resampling), strict=True):
            cut = cut[:: -1 if flip_y else 1, :: -1 if flip_x else 1]
            pixels[bucket] = np.ascontiguousarray(cut.swapaxes(0, 1) if turned else cut)
    return Picture(width, height, pixels, {bucket: at.corner for bucket, at in placements.items()})


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
