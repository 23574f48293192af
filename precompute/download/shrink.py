"""Storage of downloaded images, in place of img2dataset's resizer.

img2dataset's resizer ignores EXIF orientations, colour profiles and the range of 16-bit samples, so stage 1 would see
different images.
"""

import io
from typing import BinaryIO

from PIL import Image

from precompute.input.reject import Reject
from precompute.pixels.color import to_srgb
from precompute.pixels.opening import open_image, rejecting, turns_of

Stored = tuple[bytes | None, int | None, int | None, int | None, int | None, str | None]
"""Return value of a resizer in img2dataset: the file, its width and height, those of the original, and an error."""


def keep(stream: BinaryIO, boxes: object = None) -> Stored:
    """Keep the file as it was served."""
    return stream.read(), None, None, None, None, None


def shrink(stream: BinaryIO, boxes: object = None, *, max_side: int, quality: int) -> Stored:
    """Encode an image as an upright JPEG in sRGB whose longer side is at most `max_side`."""
    try:
        image = open_image(stream.read())
        flip_x, flip_y, turned = turns_of(image)
        with rejecting("undecodable"):
            image.load()
            rgb = to_srgb(image)
            for is_needed, how in (
                (flip_x, Image.Transpose.FLIP_LEFT_RIGHT),
                (flip_y, Image.Transpose.FLIP_TOP_BOTTOM),
                (turned, Image.Transpose.TRANSPOSE),
            ):
                rgb = rgb.transpose(how) if is_needed else rgb
            width, height = rgb.size
            rgb.thumbnail((max_side, max_side), Image.Resampling.BICUBIC, reducing_gap=None)
            file = io.BytesIO()
            rgb.save(file, "JPEG", quality=quality)
    except Reject as reject:  # without the detail, because img2dataset counts failures by their text
        return None, None, None, None, None, f"Image decoding error: {reject.reason}"
    return file.getvalue(), *rgb.size, width, height, None
