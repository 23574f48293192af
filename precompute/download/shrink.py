"""Storage of downloaded images, in place of img2dataset's resizer.

img2dataset's resizer ignores EXIF orientations, colour profiles and the range of 16-bit samples, so stage 1 would see
different images.
"""

import io
from typing import BinaryIO

from PIL import Image

from precompute.input.reject import Reject
from precompute.pixels.color import to_srgb
from precompute.pixels.opening import ORIENTATION_TAG, TURNS, open_image, orientation_of, rejecting

Stored = tuple[bytes | None, int | None, int | None, int | None, int | None, str | None]
"""Return value of a resizer in img2dataset: the file, its width and height, those of the original, and an error."""
STEPS = (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM, Image.Transpose.TRANSPOSE)
"""Pillow's operation for each of the three values in `TURNS`."""


def keep(stream: BinaryIO, boxes: object = None) -> Stored:
    """Keep the file as it was served."""
    return stream.read(), None, None, None, None, None


def shrink(stream: BinaryIO, boxes: object = None, *, max_side: int, quality: int) -> Stored:
    """Encode an image as a JPEG in sRGB whose longer side is at most `max_side`. Return sizes of the upright image.

    A rotated image stays rotated, and keeps its EXIF orientation: stage 1 blurs boxes in the upright image and in the
    image as stored, because they may refer to either.
    """
    try:
        image = open_image(stream.read())
        orientation = orientation_of(image)
        with rejecting("undecodable"):
            image.load()
            rgb = to_srgb(image)
            if image.format == "TIFF":  # Pillow has made it upright
                for step, is_needed in zip(reversed(STEPS), reversed(TURNS[orientation]), strict=True):
                    rgb = rgb.transpose(step) if is_needed else rgb
            width, height = rgb.size
            rgb.thumbnail((max_side, max_side), Image.Resampling.BICUBIC, reducing_gap=None)
            exif = Image.Exif()
            exif[ORIENTATION_TAG] = orientation
            file = io.BytesIO()
            rgb.save(file, "JPEG", quality=quality, exif=exif if orientation > 1 else b"")
    except Reject as reject:  # without the detail, because img2dataset counts failures by their text
        return None, None, None, None, None, f"Image decoding error: {reject.reason}"
    _, _, turned = TURNS[orientation]
    sizes = (rgb.height, rgb.width, height, width) if turned else (rgb.width, rgb.height, width, height)
    return file.getvalue(), *sizes, None
