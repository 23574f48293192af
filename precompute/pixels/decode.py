"""Picture bytes → one uint8 array per bucket. The header is judged first; one decode serves all buckets."""

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
from precompute.pixels.color import scale_transparency, to_srgb
from precompute.pixels.resample import Filter, place, resample
from shards.base.config import Config
from shards.format.buckets import AspectTable, Bucket, choose_buckets

Format = Literal["JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF"]
FORMATS: tuple[Format, ...] = get_args(Format)
"""All that Pillow may be asked for, of the 43 that it opens."""
SCALED_FORMATS = ("JPEG", "MPO")
"""MPO is what Pillow calls a JPEG that holds several pictures, as phones write them; the first is taken."""
ORIENTATION_TAG = 0x0112
# EXIF orientation → the stored picture flipped left-right, flipped top-bottom, then transposed, stands upright
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
Image.MAX_IMAGE_PIXELS = None  # `limits` decides, on the header
MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class PixelsConfig(Config):
    """How pictures become pixels; all of it is in encoding.json."""

    resampling: Filter = "bicubic"
    """Filter of the resize, which antialiases; lanczos is several times slower than the others."""
    crop: Literal["center"] = "center"
    """Which part of a picture of another shape is kept."""
    scaled_decode: bool = True
    """Decode large JPEGs at 1/2, 1/4 or 1/8 of their size."""
    decode_margin: float = Field(1.5, ge=1)
    """What scaled decoding leaves to the better filter of the resize: each side is still at least this many times that
    of the largest bucket it goes to."""

    @property
    def decoder(self) -> str:
        """The decoder's name for encoding.json."""
        return f"pillow-scaled-{self.decode_margin:g}" if self.scaled_decode else "pillow"

    @property
    def resampler(self) -> str:
        """Whose implementation of the filter, for encoding.json."""
        return "pillow" if self.resampling == "lanczos" else "torch"


class LimitsConfig(Config):
    """What is refused before decoding, or cut, and what decoding may take in a child process."""

    formats: tuple[Format, ...] = Field(FORMATS, min_length=1)
    """What a picture may be, by its first bytes."""
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
    attempt at the tar is given up, and the next one decodes in child processes."""
    decode_bytes: int = Field(8 << 30, ge=1 << 32)
    """Address space of a child process that decodes; torch takes 3 GB of it."""


@dataclass(frozen=True)
class Picture:
    """One picture, cut and scaled for each bucket it goes to."""

    width: int
    height: int
    """Of the upright original, in pixels."""
    pixels: dict[Bucket, np.ndarray]
    """Bucket → (height, width, 3) uint8."""
    corners: dict[Bucket, tuple[int, int]]
    """Bucket → crop's (top, left) in original pixels."""


def decode(
    data: bytes,
    buckets: Sequence[Bucket],
    config: PixelsConfig,
    limits: LimitsConfig,
    aspects: Sequence[AspectTable] = (),
) -> Picture:
    """Decode a picture for every one of `buckets` that it covers without being enlarged, and for one of each table.

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
            raise Reject("undecodable", f"it says that it is {size[0]}x{size[1]}, and is {image.width}x{image.height}")
        rgb = to_srgb(image)
        pixels = {}
        # cut and scaled as it is stored, then turned: less to turn
        places = (placement.as_stored(flip_x, flip_y, turned) for placement in placements.values())
        for bucket, cut in zip(placements, resample(rgb, places, scale, config.resampling), strict=True):
            cut = cut[:: -1 if flip_y else 1, :: -1 if flip_x else 1]
            pixels[bucket] = np.ascontiguousarray(cut.swapaxes(0, 1) if turned else cut)
    return Picture(width, height, pixels, {bucket: at.corner for bucket, at in placements.items()})


@contextmanager
def rejecting(reason: str) -> Iterator[None]:
    """Any exception inside is the sample's fault (Pillow's parsers raise a dozen kinds), but for want of memory."""
    try:
        yield
    except (MemoryError, Reject):
        raise
    except Exception as error:
        text = MEMORY_ADDRESS.sub("", f"{type(error).__name__}: {error}")  # rejects are the same in every run
        raise Reject(reason, text[:200]) from error


def _open(data: bytes, limits: LimitsConfig) -> ImageFile:
    with rejecting("not_an_image"):
        image = Image.open(io.BytesIO(data), formats=limits.formats)
    if image.width * image.height > limits.max_pixels or max(image.size) > limits.max_side:
        raise Reject("too_many_pixels", f"{image.width}x{image.height}")
    if image.format == "TIFF":
        image.info.pop("xmp", None)  # Pillow would turn the picture by it, and only once it is loaded
    with rejecting("undecodable"):
        scale_transparency(image)
    return image


def _orientation(image: Image.Image) -> int:
    # Pillow turns TIFFs itself, and gives their size as turned
    orientation = 1 if image.format == "TIFF" else image.getexif().get(ORIENTATION_TAG, 1)
    return orientation if orientation in TURNS else 1


def _shrink_on_decode(image: Image.Image, buckets: list[Bucket], turned: bool, config: PixelsConfig) -> int:
    """Have a JPEG decoded at 1/scale, where `decode_margin` allows one; returns the scale."""
    if not config.scaled_decode or image.format not in SCALED_FORMATS:
        return 1
    width, height = image.size[::-1] if turned else image.size
    spare = min(min(width / bucket.width, height / bucket.height) for bucket in buckets) / config.decode_margin
    scale = max((scale for scale in (1, 2, 4, 8) if scale <= spare), default=1)
    image.draft(None, (image.width // scale, image.height // scale))
    return scale
