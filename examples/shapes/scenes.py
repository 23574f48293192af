"""The scenes of the demo (shape x colour x background x size x place), and code to draw them.

Coordinates are relative to an image's central square, from (0, 0) at its top left to (1, 1) at its bottom right, so
that captions remain true after a center crop.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

RGB = tuple[int, int, int]
Array = np.ndarray

COLOURS: dict[str, RGB] = {
    "red": (215, 35, 40),
    "orange": (245, 140, 25),
    "yellow": (245, 222, 40),
    "green": (40, 160, 65),
    "cyan": (40, 200, 220),
    "blue": (40, 75, 220),
    "purple": (125, 40, 165),
    "pink": (245, 130, 190),
}
BACKGROUNDS: dict[str, RGB] = {
    "white": (246, 246, 246),
    "gray": (132, 132, 132),
    "black": (20, 20, 20),
    "beige": (222, 204, 170),
}
# Half the side length of the box around the shape.
SIZES: dict[str, float] = {"small": 0.21, "large": 0.295}
# Center of the box around the shape.
PLACES: dict[str, tuple[float, float]] = {
    "top left": (0.34, 0.34),
    "top": (0.5, 0.34),
    "top right": (0.66, 0.34),
    "left": (0.34, 0.5),
    "center": (0.5, 0.5),
    "right": (0.66, 0.5),
    "bottom left": (0.34, 0.66),
    "bottom": (0.5, 0.66),
    "bottom right": (0.66, 0.66),
}


def _circle(num_corners: int = 64) -> Array:
    angles = np.linspace(0, 2 * np.pi, num_corners, endpoint=False)
    return 0.95 * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _cross(arm: float = 0.36) -> Array:
    quarter = np.array([(arm, -1.0), (arm, -arm), (1.0, -arm)])
    turn = np.array([(0.0, 1.0), (-1.0, 0.0)])  # (x, y) -> (-y, x), a clockwise quarter turn on the screen
    return np.concatenate([quarter @ np.linalg.matrix_power(turn, turns) for turns in range(4)])


# Corners (corners, 2) in order, as (x, y) with y pointing down, inside the box [-1, 1] x [-1, 1].
OUTLINES: dict[str, Array] = {
    "circle": _circle(),
    "square": 0.85 * np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]),
    "triangle": np.array([(0, -0.95), (1, 0.85), (-1, 0.85)]),
    "cross": _cross(),
}

# Absent from all training images and captions. The demo samples them to test whether the model can recombine concepts.
HELD_OUT: frozenset[tuple[str, str]] = frozenset(
    {
        ("red", "triangle"),
        ("orange", "cross"),
        ("green", "square"),
        ("blue", "circle"),
        ("purple", "cross"),
        ("pink", "triangle"),
    }
)
SEEN: tuple[tuple[str, str], ...] = tuple(
    (colour, shape) for colour in COLOURS for shape in OUTLINES if (colour, shape) not in HELD_OUT
)
NUM_PROMPTS = {"seen": 78, "held_out": 48}
"""Number of fixed prompts for both kinds of combinations."""


@dataclass(frozen=True)
class Scene:
    """The facts that a caption may state, each a key of the corresponding table above."""

    colour: str
    shape: str
    background: str
    size: str
    place: str


def sample_scene(rng: np.random.Generator, combinations: tuple[tuple[str, str], ...] = SEEN) -> Scene:
    """Draw a random scene with one of the allowed (colour, shape) pairs. All choices are uniform."""
    colour, shape = combinations[rng.integers(len(combinations))]
    names = [list(BACKGROUNDS), list(SIZES), list(PLACES)]
    return Scene(colour, shape, *(each[rng.integers(len(each))] for each in names))


def draw_scene(scene: Scene, width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """Draw the scene as an RGB image, with slight variations of colour, size and position."""
    foreground, background = (
        tuple(np.clip(np.add(table[name], rng.integers(-9, 10, size=3)), 0, 255).tolist())
        for table, name in ((COLOURS, scene.colour), (BACKGROUNDS, scene.background))
    )
    middle = np.array(PLACES[scene.place]) + rng.uniform(-0.02, 0.02, size=2)
    half_side = SIZES[scene.size] + rng.uniform(-0.015, 0.015)
    side = min(width, height)
    margin = (np.array([width, height]) - side) / 2
    mask = draw_mask(scene.shape, width, height, margin + side * middle, side * half_side)
    picture = Image.new("RGB", (width, height), background)
    picture.paste(foreground, mask=Image.fromarray(mask))
    return picture


def draw_mask(shape: str, width: int, height: int, middle: Array, half_side: float, oversampling: int = 4) -> Array:
    """Draw a mask of the shape: (height, width) uint8, 255 for pixels that it fully covers. Lengths are in pixels."""
    corners = oversampling * (np.asarray(middle) + half_side * OUTLINES[shape]) - 0.5
    canvas = Image.new("L", (oversampling * width, oversampling * height))
    ImageDraw.Draw(canvas).polygon([tuple(corner) for corner in corners.tolist()], fill=255)
    return np.asarray(canvas.resize((width, height), Image.Resampling.BOX))
