"""Blur boxes in an image, such as faces, to make people unrecognisable."""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFilter

from precompute.input.reject import Reject

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, as fractions of the image's width and height."""
MARGIN = 0.1
"""Width of the margin that is blurred around a box, relative to the box's longer side."""
SIGMA = 0.1
"""Standard deviation of the blur, relative to the longer side of the largest box."""
TOLERANCE = 0.5
"""How far a box may reach beyond the image, in the units of `Box`; face detectors return such boxes."""


def boxes_of(metadata: Mapping[str, object], field: str | None) -> list[Box]:
    """Return the boxes in a field of a sample's JSON: a list of [left, top, right, bottom], or its text.

    Args:
        field: name of the field, or None to blur nothing.

    Raises:
        Reject: `bad_boxes`, if the field is missing or holds anything else. An image without boxes has an empty list.
    """
    if field is None:
        return []
    value = metadata.get(field)
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if value is None:
        raise Reject("bad_boxes", f"the sample has no {field}; for an image without boxes, it is an empty list")
    if not isinstance(value, list) or not all(map(_is_box, value)):
        problem = "not a list of [left, top, right, bottom] as fractions of the image's size"
        raise Reject("bad_boxes", f"{field} is {problem}: {value!r:.100}")
    return [(float(left), float(top), float(right), float(bottom)) for left, top, right, bottom in value]


def _is_box(box: Any) -> bool:
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(edge, int | float) for edge in box):
        return False
    left, top, right, bottom = box
    return -TOLERANCE <= left <= right <= 1 + TOLERANCE and -TOLERANCE <= top <= bottom <= 1 + TOLERANCE


def blur(image: Image.Image, boxes: Sequence[Box]) -> Image.Image:
    """Return an RGB image in which `boxes` are blurred, with soft edges.

    The blur is that of img2dataset's BoundingBoxBlurrer, which follows Yang et al., A Study of Face Obfuscation in
    ImageNet (2022): the whole image is blurred, with a sigma set by the largest box, and blended in through a blurred
    mask of the enlarged boxes. Pillow approximates the Gaussian with three box filters.
    """
    if not boxes:
        return image
    mask = Image.new("L", image.size)
    draw = ImageDraw.Draw(mask)
    largest = 0.0
    for left, top, right, bottom in boxes:
        left, right = left * image.width, right * image.width
        top, bottom = top * image.height, bottom * image.height
        side = max(right - left, bottom - top)
        margin, largest = MARGIN * side, max(largest, side)
        corners = (left - margin, top - margin, right + margin, bottom + margin)
        draw.rectangle((*map(math.floor, corners[:2]), *map(math.ceil, corners[2:])), fill=255)
    gaussian = ImageFilter.GaussianBlur(SIGMA * largest)
    return Image.composite(image.filter(gaussian), image, mask.filter(gaussian))


def turned_boxes(boxes: Sequence[Box], flip_x: bool, flip_y: bool, turned: bool) -> list[Box]:
    """Convert boxes from the coordinates of the upright image to those of the stored image, which becomes upright when
    flipped and then transposed."""
    found = []
    for left, top, right, bottom in boxes:
        if turned:
            left, top, right, bottom = top, left, bottom, right
        if flip_x:
            left, right = 1 - right, 1 - left
        if flip_y:
            top, bottom = 1 - bottom, 1 - top
        found.append((left, top, right, bottom))
    return found
