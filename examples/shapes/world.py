"""The demo's substitute for the web: a folder of captioned images, some of them broken, and a LAION-like table."""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from examples.shapes.captions import write_caption
from examples.shapes.scenes import BACKGROUNDS, Scene, draw_scene, sample_scene

NUM_PICTURES = 4000
# Share of images of each unusual kind, with at least one image per kind. All other images are "plain".
KINDS: dict[str, float] = {
    # usable, but only if decoded correctly
    "rotated": 0.01,  # a JPEG with an EXIF orientation
    "alpha": 0.005,  # a PNG with transparency instead of a white background
    "palette": 0.005,
    "cmyk": 0.001,
    "animated": 0.0003,
    # unusable
    "truncated": 0.006,  # the second half of the bytes is missing
    "html": 0.005,  # an error page instead of an image
    "empty": 0.003,
    "tiny": 0.01,  # shortest side under 64 pixels
    "captionless": 0.005,
    "missing": 0.004,  # the server answers 404
}
LOW_RESOLUTION_FRACTION = 0.12  # shortest side from 64 to 127 pixels: large enough for the 64x64 bucket only
ORIENTATIONS = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
EXIF_ORIENTATION = 0x0112
EXTENSIONS = {"rotated": "jpg", "cmyk": "jpg", "alpha": "png", "palette": "png", "animated": "webp", "html": "jpg"}
"""Kind → file extension. Images of other kinds have a random extension."""
FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}


@dataclass(frozen=True)
class PlannedPicture:
    """A planned image: its path in the served folder, kind, scene, caption and size in pixels."""

    path: str
    kind: str
    scene: Scene
    caption: str | None
    width: int
    height: int


def plan_world(num_pictures: int, seed: int) -> list[PlannedPicture]:
    """Plan all images of the demo. The same arguments always give the same list.

    Raises:
        ValueError: there are fewer images than kinds of images.
    """
    kinds = [kind for kind, fraction in KINDS.items() for _ in range(max(1, round(fraction * num_pictures)))]
    if len(kinds) > num_pictures:
        raise ValueError(
            f"num_pictures is {num_pictures}, which is too few for one image of each kind. Use at least {len(kinds)}."
        )
    kinds += ["plain"] * (num_pictures - len(kinds))
    order = np.random.default_rng(seed).permutation(num_pictures)
    return [_plan_picture(index, kinds[order[index]], seed) for index in range(num_pictures)]


def _plan_picture(index: int, kind: str, seed: int) -> PlannedPicture:
    rng = np.random.default_rng([seed, index])
    scene = sample_scene(rng)
    if kind == "alpha":
        scene = Scene(scene.colour, scene.shape, "white", scene.size, scene.place)
    caption: str | None = write_caption(scene, rng)
    if kind == "captionless":
        caption = ["", None][rng.integers(2)]
    width, height = _draw_size(kind, rng)
    extension = EXTENSIONS.get(kind) or str(rng.choice(["jpg", "png", "webp"], p=[0.6, 0.2, 0.2]))
    return PlannedPicture(f"{index // 1000:03d}/{index:06d}.{extension}", kind, scene, caption, width, height)


def _draw_size(kind: str, rng: np.random.Generator) -> tuple[int, int]:
    """Draw a width and height in pixels, with an aspect ratio between 1/2 and 2."""
    shortest = (128, 224)
    if kind == "tiny":
        shortest = (24, 63)
    elif kind == "plain" and rng.random() < LOW_RESOLUTION_FRACTION:
        shortest = (64, 127)
    short = int(rng.integers(shortest[0], shortest[1] + 1))
    long = min(320, int(short * 2 ** rng.random()))
    return (short, long) if rng.random() < 0.5 else (long, short)


def encode_picture(picture: PlannedPicture, rng: np.random.Generator) -> bytes:
    """Return the bytes that the server sends for an image."""
    if picture.kind == "html":
        return b"<!DOCTYPE html><html><body><h1>This picture has moved</h1></body></html>\n"
    if picture.kind == "empty":
        return b""
    image = draw_scene(picture.scene, picture.width, picture.height, rng)
    match picture.kind:
        case "rotated":
            orientation = list(ORIENTATIONS)[rng.integers(len(ORIENTATIONS))]
            exif = Image.Exif()
            exif[EXIF_ORIENTATION] = orientation
            return _save(image.transpose(ORIENTATIONS[orientation]), "JPEG", quality=90, exif=exif)
        case "alpha":  # a transparent background, with black as its hidden colour
            pixels = np.asarray(image)
            is_shape = np.abs(pixels.astype(int) - BACKGROUNDS["white"]).max(-1, keepdims=True) > 30
            rgba = np.concatenate([pixels * is_shape, is_shape * np.uint8(255)], axis=-1)
            return _save(Image.fromarray(rgba), "PNG")
        case "palette":
            return _save(image.quantize(32), "PNG")
        case "cmyk":
            return _save(image.convert("CMYK"), "JPEG", quality=90)
        case "animated":  # the first frame shows the scene, and the second is black
            frames = [Image.new("RGB", image.size)]
            return _save(image, "WEBP", save_all=True, append_images=frames, duration=500, quality=90)
    format, quality = FORMATS[picture.path.rpartition(".")[-1]], int(rng.integers(80, 96))
    encoded = _save(image, format) if format == "PNG" else _save(image, format, quality=quality)
    return encoded[: len(encoded) // 2] if picture.kind == "truncated" else encoded


def _save(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def write_world(folder: Path, num_pictures: int, seed: int) -> list[PlannedPicture]:
    """Draw all images, write all but the `missing` ones to `folder`, and return the plan for all images."""
    pictures = plan_world(num_pictures, seed)
    for index, picture in enumerate(pictures):
        if picture.kind != "missing":
            path = folder / picture.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode_picture(picture, np.random.default_rng([seed, index, 1])))
    return pictures


def metadata(pictures: list[PlannedPicture], address: str, seed: int = 0) -> pa.Table:
    """Build a table with LAION's columns and one row per image, served at `address` (without a trailing slash)."""
    rng = np.random.default_rng([seed, 2])
    num_rows = len(pictures)
    is_unsafe = rng.random(num_rows) < 0.02
    return pa.table(
        {
            "URL": [f"{address}/{picture.path}" for picture in pictures],
            "TEXT": pa.array([picture.caption for picture in pictures], pa.string()),
            "WIDTH": pa.array([picture.width for picture in pictures], pa.int32()),
            "HEIGHT": pa.array([picture.height for picture in pictures], pa.int32()),
            "similarity": rng.normal(0.33, 0.02, num_rows),
            "hash": rng.integers(-(2**63), 2**63 - 1, num_rows),
            "punsafe": np.where(is_unsafe, rng.uniform(0.1, 1, num_rows), rng.uniform(0, 0.09, num_rows)),
            "pwatermark": rng.beta(1, 8, num_rows),
            "aesthetic": rng.normal(5.6, 0.5, num_rows),
        }
    )
