"""Images of fixed prompts, read from a sample set and arranged side by side. They may be scaled down."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from PIL import Image, ImageDraw, ImageFont

from evaluation.parts import read_part, read_receipts, read_sealed
from evaluation.sampling.prompts import Prompt
from evaluation.sampling.sets import PICTURES, RECORD, file_name
from shards.base.errors import DamagedInput
from shards.open import open_store

Item = TypeVar("Item")
LABEL_HEIGHT, GAP = 20, 4
"""Height of a label and distance between images, in pixels."""


def first_pictures(place: Path | str, count: int, side: int) -> dict[Prompt, Image.Image]:
    """Read the first image for each of a sample set's first `count` prompts, scaled down to at most `side` pixels.

    Images in missing parts are skipped. Damaged images are skipped with a message.
    """
    store = open_store(place)
    content = read_sealed(store, RECORD)
    if content is None:
        return {}
    codec, shown = content["drawing"]["codec"], {}
    for number, prompt in enumerate(content["prompts"][:count]):
        sample = number * content["drawing"]["images_per_prompt"]
        part, name = f"{sample // content['part_size']:05d}", file_name(sample, codec)
        for receipt in read_receipts(store, PICTURES, [part]).values():
            try:
                data = read_part(store, receipt | {"files": {name: receipt["files"][name]}})[name]
            except DamagedInput as error:
                print(f"Skipping an image: {error}", flush=True)
                continue
            picture = Image.open(io.BytesIO(data), formats=["PNG", "WEBP"])
            picture.thumbnail((side, side), Image.Resampling.LANCZOS)
            shown[Prompt(**prompt)] = picture.convert("RGB")
    return shown


def side_by_side(pictures: Mapping[str, Image.Image]) -> Image.Image:
    """Arrange labelled images in a row, each below its label."""
    font = ImageFont.load_default(14)
    label_widths = [int(font.getlength(label)) + 4 for label in pictures]
    width = max(*(picture.width for picture in pictures.values()), *label_widths)
    tiles = []
    for label, picture in pictures.items():
        tile = Image.new("RGB", (width, picture.height + LABEL_HEIGHT), "white")
        ImageDraw.Draw(tile).text((2, 2), label, fill="black", font=font)
        tile.paste(picture, (0, LABEL_HEIGHT))
        tiles.append(tile)
    return grid(tiles, len(tiles))


def grid(pictures: Sequence[Image.Image], columns: int) -> Image.Image:
    """Arrange images in rows of `columns`, left to right."""
    width, height = (max(sizes) for sizes in zip(*(picture.size for picture in pictures), strict=True))
    rows = -(-len(pictures) // columns)
    whole = Image.new("RGB", (min(columns, len(pictures)) * (width + GAP) - GAP, rows * (height + GAP) - GAP), "white")
    for number, picture in enumerate(pictures):
        whole.paste(picture, (number % columns * (width + GAP), number // columns * (height + GAP)))
    return whole


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Choose at most `count` evenly spaced items, including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]
