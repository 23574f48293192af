"""Resizing and center-cropping of an image for a bucket.

The image is scaled to cover the bucket, with both sides rounded to whole pixels, and then center-cropped at whole
pixels. Pixels to the right of the crop or below it are not computed.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor

from shards.format.buckets import Bucket

Filter = Literal["bilinear", "bicubic", "lanczos"]
SUPPORT = {"bilinear": 1, "bicubic": 2}
"""Filter → its radius in output pixels."""
SHRINK = {
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.default,
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.default,
}
"""Vectorised versions of Pillow's filters; results differ from Pillow's by at most two levels (of 255)."""


@dataclass(frozen=True)
class Placement:
    """The crop for a bucket in a width × height image that is scaled to scaled_width × scaled_height."""

    width: int
    height: int
    scaled_width: int
    scaled_height: int
    left: int
    """Left edge of the crop in scaled pixels."""
    top: int
    """Top edge of the crop in scaled pixels."""
    bucket: Bucket

    @property
    def corner(self) -> tuple[int, int]:
        """(top, left) of the crop in original pixels."""
        return round(self.top * self.height / self.scaled_height), round(self.left * self.width / self.scaled_width)

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Crop as (left, top, right, bottom) in original pixels, for `Image.resize(bucket, filter, box)`, which scales
        and crops in one step."""
        x, y = self.width / self.scaled_width, self.height / self.scaled_height
        right, bottom = self.left + self.bucket.width, self.top + self.bucket.height
        return self.left * x, self.top * y, min(right * x, self.width), min(bottom * y, self.height)

    def as_stored(self, flip_x: bool, flip_y: bool, turned: bool) -> "Placement":
        """Return the same crop in the image as stored, which must be flipped and then transposed to make it upright."""
        at = self
        if turned:
            at = Placement(
                at.height, at.width, at.scaled_height, at.scaled_width, at.top, at.left,
                Bucket(at.bucket.height, at.bucket.width),
            )  # fmt: skip
        left = at.scaled_width - at.bucket.width - at.left if flip_x else at.left
        top = at.scaled_height - at.bucket.height - at.top if flip_y else at.top
        return replace(at, left=left, top=top)


def place(width: int, height: int, bucket: Bucket) -> Placement:
    """Return the center crop of a width × height image for a bucket. If the margin is odd, the crop is half a pixel off
    center."""
    if width * bucket.height < height * bucket.width:
        scaled = bucket.width, _rounded(height * bucket.width, width)
    else:
        scaled = _rounded(width * bucket.height, height), bucket.height
    return Placement(width, height, *scaled, (scaled[0] - bucket.width) // 2, (scaled[1] - bucket.height) // 2, bucket)


def _rounded(a: int, b: int) -> int:
    """Return a / b rounded to the nearest integer, halves up."""
    return (2 * a + b) // (2 * b)


def resample(
    image: Image.Image, places: Iterable[Placement], decoded_scale: int, filter: Filter
) -> Iterator[np.ndarray]:
    """Yield a (height, width, 3) uint8 array for each placement, from an image that was decoded at 1/decoded_scale of
    its size."""
    if filter == "lanczos":
        yield from (_by_pillow(image, at, decoded_scale) for at in places)
    else:
        pixels = _pixels(image)  # once for all placements: for a small image, this takes as long as the rest
        yield from (_by_torch(pixels, at, decoded_scale, filter) for at in places)


def _by_pillow(image: Image.Image, at: Placement, decoded_scale: int) -> np.ndarray:
    left, top, right, bottom = (edge / decoded_scale for edge in at.box)
    box = left, top, min(right, image.width), min(bottom, image.height)
    size = (at.bucket.width, at.bucket.height)
    return np.asarray(image.resize(size, Image.Resampling.LANCZOS, box))


def _by_torch(pixels: Tensor, at: Placement, decoded_scale: int, filter: Filter) -> np.ndarray:
    # scaled pixels per decoded pixel; computed from the original size, because the decoder rounds sizes up
    scale_x = at.scaled_width * decoded_scale / at.width
    scale_y = at.scaled_height * decoded_scale / at.height
    right, bottom = at.left + at.bucket.width, at.top + at.bucket.height
    rows = math.ceil((bottom + SUPPORT[filter]) / scale_y) + 1
    # pixels to the right of the crop or below it are not computed
    scaled: Tensor = SHRINK[filter](pixels[:, :, :rows], [bottom, right], False, scale_y, scale_x)
    return _rgb(scaled.numpy()[0, :, at.top :, at.left :].transpose(1, 2, 0))


def _rgb(values: np.ndarray) -> np.ndarray:
    """Copy the first three channels of a (height, width, 3 or 4) array into a contiguous (height, width, 3) array."""
    pixels = np.empty((*values.shape[:2], 3), np.uint8)
    for channel in range(3):  # a single NumPy copy, in runs of three bytes, takes six times as long
        pixels[..., channel] = values[..., channel]
    return pixels


def _pixels(image: Image.Image) -> Tensor:
    """Return an RGB image as (1, channels, height, width) uint8, channels last in memory.

    The result is a view of Pillow's own memory (four bytes per pixel) if this memory is contiguous, and a copy
    otherwise.
    """
    try:
        values = torch.from_dlpack(pa.array(image).values).view(1, image.height, image.width, 4)
    except ValueError:  # the image is larger than one of Pillow's memory blocks (16 MB)
        values = torch.from_numpy(np.array(image))[None]
    return values.permute(0, 3, 1, 2)
