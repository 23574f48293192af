"""Open image files: accepted formats, limits that the header has to meet, and EXIF orientation."""

import io
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from PIL import Image
from PIL.ImageFile import ImageFile

from precompute.input.reject import Reject
from precompute.pixels.color import scale_transparency

Format = Literal["JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF"]
FORMATS: tuple[Format, ...] = get_args(Format)
"""The only formats that Pillow may open; it supports 43."""
MAX_PIXELS, MAX_SIDE = 100_000_000, 30_000
"""Default limits on width × height and on each side."""
ORIENTATION_TAG = 0x0112
Turns = tuple[bool, bool, bool]
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
Image.MAX_IMAGE_PIXELS = None  # the limits replace Pillow's check
MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


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


def open_image(
    data: bytes,
    formats: Collection[Format] = FORMATS,
    max_pixels: int = MAX_PIXELS,
    max_side: int = MAX_SIDE,
) -> ImageFile:
    """Open an image without decoding its pixels.

    Raises:
        Reject: `not_an_image`, `too_many_pixels` or `undecodable`.
    """
    with rejecting("not_an_image"):
        image = Image.open(io.BytesIO(data), formats=tuple(formats))
    if image.width * image.height > max_pixels or max(image.size) > max_side:
        raise Reject("too_many_pixels", f"{image.width}x{image.height}")
    _drop_xmp(image)
    with rejecting("undecodable"):
        scale_transparency(image)
    return image


def _drop_xmp(image: ImageFile) -> None:
    """Drop an image's XMP, whose orientation Pillow would apply if there is none in EXIF."""
    for name in ("xmp", "XML:com.adobe.xmp"):
        image.info.pop(name, None)


def turns_of(image: ImageFile) -> tuple[Turns, Turns]:
    """Return how the pixels that Pillow decodes have to be flipped left-right, flipped top-bottom and then transposed
    to be upright, and the arguments for `turned_boxes` that convert boxes between the upright image and the image as
    stored, into the orientation of these pixels. Call this before the image is decoded.

    Raises:
        Reject: `undecodable`.
    """
    flip_x, flip_y, turned = turns = TURNS[orientation_of(image)]
    if image.format != "TIFF":
        return turns, turns
    # Pillow decodes TIFFs upright; boxes are then flipped before they are transposed, which swaps the flips
    return TURNS[1], (flip_y, flip_x, True) if turned else turns


def orientation_of(image: ImageFile) -> int:
    """Return the EXIF orientation that is recorded in the file, from 1 to 8, or 1 if there is none or the EXIF cannot
    be parsed. Call this before the image is decoded.

    Raises:
        Reject: `undecodable`.
    """
    if image.format == "PNG" and "exif" not in image.info:
        with rejecting("undecodable"):
            image.load()  # getexif would do so, too, because EXIF and XMP may follow the pixels
        _drop_xmp(image)
    try:
        orientation = image.getexif().get(ORIENTATION_TAG)
        return int(orientation) if orientation in TURNS else 1
    except MemoryError:  # it exceeded the memory limit, which says nothing about the EXIF
        raise
    except Exception:  # the pixels are intact; Pillow raises a dozen types of exceptions, as in `rejecting`
        return 1
