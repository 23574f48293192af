"""Recognise the colour and shape in an image by geometry alone, without any learned or random component."""

from dataclasses import dataclass

import numpy as np

from examples.shapes.scenes import BACKGROUNDS, COLOURS, OUTLINES, draw_mask

Array = np.ndarray

MIN_CONTRAST = 60.0  # RGB distance between foreground and background
MAX_COLOUR_DISTANCE = 95.0  # RGB distance between the foreground and a colour's nominal value
MIN_OVERLAP = 0.75  # intersection over union of the foreground with a shape of equal area and centroid
MIN_PLAIN_BORDER = 0.7  # share of the border that must have the background's colour
AREA_LIMITS = (0.02, 0.45)  # share of the image that the foreground may cover


@dataclass(frozen=True)
class Verdict:
    """The colour and the shape recognised in an image; None for anything that the demo does not draw."""

    colour: str | None
    shape: str | None


NOTHING = Verdict(None, None)


def judge(picture: Array) -> Verdict:
    """Recognise what is shown on the plain background of a square image, (height, width, 3) uint8."""
    pixels = picture.astype(np.float64)
    background, border_is_plain = _background(pixels)
    distance = np.linalg.norm(pixels - background, axis=-1)  # (height, width)
    contrast = np.quantile(distance, 0.99)
    if not border_is_plain or contrast < MIN_CONTRAST:
        return NOTHING
    foreground = np.median(pixels[distance > 0.8 * contrast], axis=0)
    coverage = _coverage(pixels, background, foreground)
    if not AREA_LIMITS[0] < coverage.mean() < AREA_LIMITS[1]:
        return NOTHING
    return Verdict(_nearest_colour(foreground), _best_shape(coverage))


def _background(pixels: Array) -> tuple[Array, bool]:
    """Return the median colour (3,) of the image's border, and whether most of the border is close to that colour."""
    width = max(1, len(pixels) // 32)
    inner = np.zeros(pixels.shape[:2], dtype=bool)
    inner[width:-width, width:-width] = True
    border = pixels[~inner]
    background = np.median(border, axis=0)
    is_near = np.linalg.norm(border - background, axis=-1) < MIN_CONTRAST / 2
    return background, bool(is_near.mean() >= MIN_PLAIN_BORDER)


def _coverage(pixels: Array, background: Array, foreground: Array) -> Array:
    """Return the foreground coverage of each pixel, from 0 (background) to 1 (foreground); shape (height, width)."""
    direction = foreground - background
    coverage = (pixels - background) @ direction / (direction @ direction)
    return np.where(coverage > 0.15, np.clip(coverage, 0, 1), 0)


def _nearest_colour(foreground: Array) -> str | None:
    """Return the name of the nearest colour, or None if a background is nearer or all colours are too far away."""
    tints = COLOURS | BACKGROUNDS
    distances = {name: float(np.linalg.norm(foreground - tint)) for name, tint in tints.items()}
    nearest = min(distances, key=lambda name: distances[name])
    return nearest if nearest in COLOURS and distances[nearest] < MAX_COLOUR_DISTANCE else None


def _best_shape(coverage: Array) -> str | None:
    """Return the shape that overlaps the coverage best when drawn with equal area and centroid.

    Returns:
        None if no shape overlaps the coverage well enough.
    """
    overlaps = {shape: _overlap(coverage, shape) for shape in OUTLINES}
    best = max(overlaps, key=lambda shape: overlaps[shape])
    return best if overlaps[best] >= MIN_OVERLAP else None


def _overlap(coverage: Array, shape: str) -> float:
    """Compute the intersection over union of the coverage (height, width) with a shape of equal area and centroid."""
    height, width = coverage.shape
    area = coverage.sum()
    centroid = np.array([(coverage.sum(0) @ (np.arange(width) + 0.5)), (coverage.sum(1) @ (np.arange(height) + 0.5))])
    unit_area, unit_centroid = _area_and_centroid(OUTLINES[shape])
    half_side = np.sqrt(area / unit_area)
    template = draw_mask(shape, width, height, centroid / area - half_side * unit_centroid, half_side) / 255
    return float(np.minimum(coverage, template).sum() / np.maximum(coverage, template).sum())


def _area_and_centroid(corners: Array) -> tuple[float, Array]:
    """Compute the area and the centroid (x, y) of a polygon (n, 2) by the shoelace formula."""
    following = np.roll(corners, -1, axis=0)
    cross = corners[:, 0] * following[:, 1] - following[:, 0] * corners[:, 1]
    area = cross.sum() / 2
    return float(abs(area)), ((corners + following) * cross[:, None]).sum(0) / (6 * area)
