"""Prepare a study's folder from sample sets: anonymous images without metadata, and the protocol."""

import csv
import hashlib
import io
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from secrets import token_hex
from typing import Any

from PIL import Image, ImageOps

from evaluation.parts import read_part
from evaluation.sampling.sets import SampleSet, file_name, list_samples, read_set
from evaluation.study.protocol import PICTURES, RECORD, Item, Protocol, ProtocolConfig, make_secret, picture_name
from evaluation.study.schedule import KeyedDraws, at_least_one
from shards.base.durable import create_file, sealed_json, write_atomically, write_file
from shards.base.errors import RequestError
from shards.base.store import Place, resolved_place
from shards.open import open_store

SAME = ("prompts", "seed", "images_per_prompt", "num_samples", "size")
"""Settings that all sample sets must share, so that only the models differ and raters cannot tell them apart by image
size."""
PIXEL_SIZE = 16
"""Side of the blocks in a pixelated gold image, in pixels."""
MAX_GOLD = 100
"""Maximum number of gold items to make, unless each rater needs more."""
Pictures = dict[tuple[str, int], str]
"""(prompt id, index) → file name of the image in the study."""


def prepare(sets: Sequence[Place], config: ProtocolConfig, folder: Path) -> Protocol:
    """Write the study's images and protocol.json. To complete an interrupted preparation, run it again.

    Raises:
        RequestError: the sets are not comparable, there are too few gold items, or the folder contains a study with a
            different protocol.
        WorkError: images are missing from a set.
    """
    sample_sets = [read_set(place) for place in sets]
    check_comparable_sets(sample_sets, config)
    secret = make_secret(folder)
    pictures = [copy_pictures(sample_set, folder, secret) for sample_set in sample_sets]
    items = make_items(sample_sets[0], pictures, len(sample_sets))
    gold = find_gold(sample_sets[0], pictures, len(items), config, folder, secret)
    protocol = Protocol(
        config=config,
        secret_sha256=hashlib.sha256(secret).hexdigest(),
        models=[
            {
                "place": resolved_place(each.place),
                **asdict(each.model),
                "drawing_id": each.drawing_id,
                **each.drawing["setting"],
            }
            for each in sample_sets
        ],
        items=items,
        gold=gold,
    )
    path = folder / RECORD
    content = sealed_json(protocol.as_json())
    create_file(path, write_file(folder / f".{RECORD}.{token_hex(4)}", content))
    if path.read_bytes() != content:
        raise RequestError(
            f"{folder} already contains a study with a different protocol. Changing the protocol requires a new study, "
            f"because otherwise the rules could be adapted to the votes. Choose another folder with --output (with "
            f"make study: OUT=FOLDER)."
        )
    return protocol


def check_comparable_sets(sets: Sequence[SampleSet], config: ProtocolConfig) -> None:
    """Check that the images in these sets can be compared side by side, and that there are enough raters."""
    if len(sets) < 2 or len({resolved_place(one.place) for one in sets}) < len(sets):
        raise RequestError(
            "A study needs at least two different sample sets. Name them with --sets SAMPLES,SAMPLES (with make study: "
            "A=SAMPLES B=SAMPLES)."
        )
    for other in sets[1:]:
        differ = [name for name in SAME if other.drawing[name] != sets[0].drawing[name]]
        if differ:
            shown = ", ".join(f"{name} ({sets[0].drawing[name]} and {other.drawing[name]})" for name in differ)
            raise RequestError(
                f"{sets[0].place} and {other.place} cannot be compared: they differ in {shown}. Draw both with the "
                f"same prompts, sampling.seed, sampling.images_per_prompt and sampling.size."
            )
    if config.votes_per_item > config.raters:
        raise RequestError(
            f"protocol.votes_per_item = {config.votes_per_item} exceeds protocol.raters = {config.raters}, but a "
            f"rater votes only once on each item. Raise protocol.raters or lower protocol.votes_per_item."
        )


def copy_pictures(found: SampleSet, folder: Path, secret: bytes) -> Pictures:
    """Copy a sample set's images into the study's folder."""
    samples = list_samples(found.prompts, found.drawing["images_per_prompt"])
    by_file = {file_name(sample.number, found.drawing["codec"]): sample for sample in samples}
    names = {}
    for receipt in found.parts.values():
        for name, data in read_part(open_store(found.place), receipt).items():
            key = (by_file[name].prompt.id, by_file[name].index)
            names[key] = add_picture(data, f"{name} of {found.place}", folder, secret)
    return names


def add_picture(data: bytes, source: object, folder: Path, secret: bytes, pixelated: bool = False) -> str:
    """Re-encode an image as PNG without metadata, store it in the study's folder and return its file name.

    Args:
        source: where the image comes from, for error messages.
    """
    try:
        with Image.open(io.BytesIO(data), formats=["PNG", "WEBP", "JPEG"]) as picture:
            pixels = ImageOps.exif_transpose(picture).convert("RGB")
    except Exception:  # Pillow's parsers, such as that of EXIF, raise a dozen types of exceptions
        raise RequestError(f"{source} cannot be decoded as PNG, WebP or JPEG. Replace the file.") from None
    if pixelated:
        width, height = (max(1, side // PIXEL_SIZE) for side in pixels.size)
        small = pixels.resize((width, height), Image.Resampling.BOX)
        pixels = small.resize(pixels.size, Image.Resampling.NEAREST)
    encoded = io.BytesIO()
    bare = Image.frombytes("RGB", pixels.size, pixels.tobytes())  # `pixels` still has the metadata
    bare.save(encoded, "png")
    content = encoded.getvalue()
    path = folder / PICTURES / picture_name(secret, content)
    if not path.is_file() or path.read_bytes() != content:
        write_atomically(path, content)
    return path.name


def make_items(found: SampleSet, pictures: Sequence[Pictures], num_models: int) -> list[Item]:
    """Pair the models' images: one item for every pair of models, prompt and index."""
    items = []
    for sample in list_samples(found.prompts, found.drawing["images_per_prompt"]):
        prompt, key = sample.prompt, (sample.prompt.id, sample.index)
        for a, b in combinations(range(num_models), 2):
            shown = (pictures[a][key], pictures[b][key])
            name = f"{prompt.id}/{sample.index}/{a}-{b}"
            items.append(Item(name, prompt.id, prompt.text, prompt.category, (a, b), shown))
    return items


def find_gold(
    found: SampleSet, pictures: Sequence[Pictures], num_items: int, config: ProtocolConfig, folder: Path, secret: bytes
) -> list[Item]:
    """Read or make the gold items.

    Raises:
        RequestError: there are fewer than a rater should see, or the user's gold file cannot be used.
    """
    most_items = -(-num_items * config.votes_per_item // config.raters)  # raters' counts differ by at most one
    per_rater = at_least_one(config.gold.share, most_items)
    if config.gold.file is not None:
        gold = read_gold(config.gold.file, list(config.questions), folder, secret)
    else:
        gold = make_gold(found, pictures, per_rater, config.seed, folder, secret)
    if len(gold) < per_rater:
        raise RequestError(
            f"protocol.gold.share = {config.gold.share} requires {per_rater} gold items per rater, but the study has "
            f"only {len(gold)}. With fewer, raters who click without looking may go undetected. Lower "
            f"protocol.gold.share, sample more prompts (each gives at most one gold item), or list at least "
            f"{per_rater} gold items in protocol.gold.file."
        )
    return gold


def make_gold(
    found: SampleSet, pictures: Sequence[Pictures], per_rater: int, seed: int, folder: Path, secret: bytes
) -> list[Item]:
    """Make gold items, which pair a prompt's image with a worse one: a pixelated image of another prompt.

    The models take turns supplying the images.

    Args:
        per_rater: maximum number of gold items that one rater sees.
    """
    if len(found.prompts) < 2:
        raise RequestError(
            "There is only one prompt, so gold items cannot be made, and a study without them cannot detect raters who "
            "click without looking. Sample more prompts, or provide your own gold items (protocol.gold.file)."
        )
    draws = KeyedDraws(secret, seed)
    prompts = draws.shuffled(found.prompts, "gold prompts")
    gold = []
    # twice as many as each rater sees, so that raters who compare notes do not recognize all of them
    for number in range(min(len(prompts), max(MAX_GOLD, per_rater), 2 * per_rater)):
        prompt, other = prompts[number], prompts[(number + 1) % len(prompts)]
        its = pictures[number % len(pictures)]
        path = folder / PICTURES / its[other.id, 0]
        shown = (its[prompt.id, 0], add_picture(path.read_bytes(), path, folder, secret, pixelated=True))
        gold.append(Item(f"gold/{number}", prompt.id, prompt.text, prompt.category, None, shown))
    return gold


def read_gold(path: Path, questions: Sequence[str], folder: Path, secret: bytes) -> list[Item]:
    """Read the user's own gold items from a CSV file."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows: list[dict[str, Any]] = list(csv.DictReader(file))
        gold = []
        for number, row in enumerate(rows):
            files = [path.parent / row[name] for name in ("better", "worse")]
            better, worse = (add_picture(file.read_bytes(), file, folder, secret) for file in files)
            id, question = f"gold/{number}", row.get("question") or None
            if question is not None and question not in questions:
                raise RequestError(
                    f"The gold file {path} has an item for the question {question}, which the study does not ask. Use "
                    f"{' or '.join(questions)}, or leave the cell empty if every question counts."
                )
            gold.append(Item(id, id, row["prompt"], None, None, (better, worse), question))
    except (OSError, KeyError, TypeError, csv.Error, UnicodeDecodeError) as error:
        raise RequestError(
            f"The gold file {path} cannot be used: {type(error).__name__}: {error}. It must be a CSV with the columns "
            f"prompt, better and worse, where better and worse are image paths relative to the file."
        ) from error
    if not gold:
        raise RequestError(f"The gold file {path} has no rows. Add at least one item whose better image is known.")
    return gold
