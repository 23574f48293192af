"""Sample sets → a study's folder: pictures without metadata under names that say nothing, and the protocol."""

import csv
import hashlib
import io
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from secrets import token_hex
from typing import Any

from PIL import Image

from evaluation.parts import read_part
from evaluation.sampling.job import SampleSet, list_samples, read_set
from evaluation.sampling.pipeline import Sample
from evaluation.sampling.worker import file_name
from evaluation.study.protocol import PICTURES, RECORD, Item, Protocol, ProtocolConfig, make_secret, picture_name
from evaluation.study.schedule import Draws, at_least_one
from shards.base.durable import create_file, sealed_json, write_atomically, write_file
from shards.base.errors import RequestError
from shards.base.store import Place
from shards.open import open_store

SAME = ("prompts", "seed", "images_per_prompt", "num_samples", "size")
"""What sample sets must share: else raters compare other things than models, or can tell them by a picture's size."""
COARSE = 16
"""Sides of a worse picture's squares are a sixteenth of the picture's."""
MOST_GOLD = 100
Pictures = dict[tuple[str, int], str]
"""(prompt's id, index) → the picture's name in the study."""


def prepare(sets: Sequence[Place], config: ProtocolConfig, folder: Path) -> Protocol:
    """Write pictures and protocol.json; the same command again completes or leaves what is there.

    Raises:
        RequestError: the sets do not fit together, or the folder holds a study with another protocol.
        WorkError: pictures are missing from a set.
    """
    found = [read_set(place) for place in sets]
    check_fit(found, config)
    secret = make_secret(folder)
    pictures = [copy_pictures(one, folder, secret) for one in found]
    items = make_items(found[0], pictures, len(found))
    if config.gold.file is not None:
        gold = read_gold(config.gold.file, folder, secret)
    else:
        gold = make_gold(found[0], pictures, config, folder, secret)
    protocol = Protocol(
        **config.model_dump(exclude={"gold"}),
        gold_share=config.gold.share,
        exclude_below=config.gold.exclude_below,
        secret_sha256=hashlib.sha256(secret).hexdigest(),
        models=[
            {"place": str(one.place), **asdict(one.model), "drawing_id": one.drawing_id, **one.drawing["setting"]}
            for one in found
        ],
        items=items,
        gold=gold,
    )
    path = folder / RECORD
    content = sealed_json(protocol.as_json())
    create_file(path, write_file(folder / f".{RECORD}.{token_hex(4)}", content))
    if path.read_bytes() != content:
        raise RequestError(
            f"{folder} holds a study with another protocol. A changed protocol is another study, or its votes could be "
            f"explained afterwards: prepare it in another folder with --output (make's OUT=)."
        )
    return protocol


def check_fit(sets: Sequence[SampleSet], config: ProtocolConfig) -> None:
    """Whether pictures of these sets can be put side by side.

    Raises:
        RequestError: fewer than two sets, one twice, they differ in what they must share, or too few raters.
    """
    if len(sets) < 2 or len({str(one.place) for one in sets}) < len(sets):
        raise RequestError("A study needs two or more different sample sets: --sets PLACE,PLACE, or make's A= and B=.")
    for other in sets[1:]:
        differ = [name for name in SAME if other.drawing[name] != sets[0].drawing[name]]
        if differ:
            shown = "; ".join(f"{name}: {sets[0].drawing[name]} and {other.drawing[name]}" for name in differ)
            raise RequestError(
                f"{sets[0].place} and {other.place} cannot be put side by side: they differ in {shown}. Draw both with "
                f"the same prompts, sampling.seed, sampling.images_per_prompt and sampling.size."
            )
    if config.votes_per_item > config.raters:
        raise RequestError(
            f"protocol.votes_per_item = {config.votes_per_item}, of {config.raters} raters: a rater votes on an item "
            f"once. Invite more (protocol.raters), or ask for fewer votes."
        )


def copy_pictures(found: SampleSet, folder: Path, secret: bytes) -> Pictures:
    samples = iter(list_samples(found.prompts, found.drawing["images_per_prompt"]))
    names = {}
    for receipt in found.parts.values():
        files = read_part(open_store(found.place), receipt)
        for _ in receipt["samples"]:
            sample: Sample = next(samples)
            data = files[file_name(sample.number, found.drawing["codec"])]
            names[sample.prompt.id, sample.index] = add_picture(data, folder, secret)
    return names


def add_picture(data: bytes, folder: Path, secret: bytes, coarse: bool = False) -> str:
    """A picture's pixels as PNG, whatever it was, without metadata; returns its name.

    Raises:
        RequestError: it is no PNG, WebP or JPEG.
    """
    try:
        with Image.open(io.BytesIO(data), formats=["PNG", "WEBP", "JPEG"]) as picture:
            pixels = picture.convert("RGB")
    except OSError as error:
        raise RequestError(f"A picture cannot be read: {error}. Pictures are PNG, WebP or JPEG.") from None
    if coarse:
        small = pixels.resize((max(1, pixels.width // COARSE), max(1, pixels.height // COARSE)), Image.Resampling.BOX)
        pixels = small.resize(pixels.size, Image.Resampling.NEAREST)
    encoded = io.BytesIO()
    bare = Image.frombytes("RGB", pixels.size, pixels.tobytes())  # `pixels` carries metadata along
    bare.save(encoded, "png")
    content = encoded.getvalue()
    path = folder / PICTURES / picture_name(secret, content)
    if not path.is_file() or path.read_bytes() != content:
        write_atomically(path, content)
    return path.name


def make_items(found: SampleSet, pictures: Sequence[Pictures], num_models: int) -> list[Item]:
    """Every picture of every prompt, of each pair of models."""
    items = []
    for sample in list_samples(found.prompts, found.drawing["images_per_prompt"]):
        prompt, key = sample.prompt, (sample.prompt.id, sample.index)
        for a, b in combinations(range(num_models), 2):
            shown = (pictures[a][key], pictures[b][key])
            name = f"{prompt.id}/{sample.index}/{a}-{b}"
            items.append(Item(name, prompt.id, prompt.text, prompt.category, (a, b), shown))
    return items


def make_gold(
    found: SampleSet, pictures: Sequence[Pictures], config: ProtocolConfig, folder: Path, secret: bytes
) -> list[Item]:
    """A picture of some prompt beside a coarse one of another prompt, by the models in turn.

    Raises:
        RequestError: there is one prompt alone.
    """
    if len(found.prompts) < 2:
        raise RequestError(
            "There is one prompt, so that no gold item can be made, and a study without gold cannot tell raters who "
            "look from those who click. Sample more prompts, or give gold of your own (protocol.gold.file)."
        )
    draws = Draws(secret, config.seed)
    prompts = draws.shuffled(found.prompts, "gold prompts")
    gold = []
    for number in range(min(len(prompts), num_gold(config, len(found.prompts), len(pictures)))):
        prompt, other = prompts[number], prompts[(number + 1) % len(prompts)]
        its = pictures[number % len(pictures)]
        worse = (folder / PICTURES / its[other.id, 0]).read_bytes()
        shown = (its[prompt.id, 0], add_picture(worse, folder, secret, coarse=True))
        gold.append(Item(f"gold/{number}", prompt.id, prompt.text, prompt.category, None, shown))
    return gold


def num_gold(config: ProtocolConfig, num_prompts: int, num_models: int) -> int:
    """Twice what one rater is shown: raters who talk to each other do not all know them."""
    items = num_prompts * num_models * (num_models - 1) // 2 * config.votes_per_item / config.raters
    return min(MOST_GOLD, 2 * at_least_one(config.gold.share, round(items)))


def read_gold(path: Path, folder: Path, secret: bytes) -> list[Item]:
    """Gold of the user's own.

    Raises:
        RequestError: the file cannot be read, lacks a column, has no row, or names a picture that is not there.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows: list[dict[str, Any]] = list(csv.DictReader(file))
        gold = []
        for number, row in enumerate(rows):
            two = [add_picture((path.parent / row[name]).read_bytes(), folder, secret) for name in ("better", "worse")]
            gold.append(Item(f"gold/{number}", f"gold/{number}", row["prompt"], None, None, (two[0], two[1])))
    except (OSError, KeyError, TypeError, csv.Error, UnicodeDecodeError) as error:
        raise RequestError(
            f"The gold file {path} cannot be used: {type(error).__name__}: {error}. It is a CSV with columns prompt, "
            f"better and worse; the latter two are paths of pictures from its own folder."
        ) from error
    if not gold:
        raise RequestError(f"The gold file {path} has no row: a study needs items whose better picture is known.")
    return gold
