"""A sample set in its folder or at its URL: a record of what is drawn, and committed parts with the images."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.parts import PartReceipt, read_receipts, read_sealed
from evaluation.sampling.model import Model
from evaluation.sampling.prompts import Prompt
from evaluation.sampling.settings import Codec
from shards.base.errors import RequestError, WorkError
from shards.open import open_store

RECORD, PICTURES = "sampling.json", "pictures"


@dataclass(frozen=True)
class PlannedImage:
    """An image to draw, identified by its prompt and index."""

    number: int
    """Position in the sample set."""
    prompt: Prompt
    index: int
    """Index among the images of the prompt."""


@dataclass(frozen=True)
class SampleSet:
    """A complete sample set: the images that one model drew with one sampling setting."""

    place: Path | str
    drawing: dict[str, Any]
    drawing_id: str
    model: Model
    prompts: list[Prompt]
    parts: dict[str, PartReceipt]
    """Name → receipt of each part, in the order of the samples."""


def below(place: Path | str, name: str) -> Path | str:
    """Join a local folder or a URL with a relative path."""
    return place / name if isinstance(place, Path) else f"{place}/{name}"


def file_name(number: int, codec: Codec) -> str:
    """Return the file name of a sample."""
    return f"{number:07d}.{codec}"


def list_samples(prompts: list[Prompt], images_per_prompt: int) -> list[PlannedImage]:
    """List all samples of a set, ordered by prompt and index."""
    pairs = [(prompt, index) for prompt in prompts for index in range(images_per_prompt)]
    return [PlannedImage(number, prompt, index) for number, (prompt, index) in enumerate(pairs)]


def split(samples: list[PlannedImage], part_size: int) -> list[tuple[str, list[PlannedImage]]]:
    """Split samples into named parts of `part_size`. The last part may be smaller."""
    starts = range(0, len(samples), part_size)
    return [(f"{number:05d}", samples[start : start + part_size]) for number, start in enumerate(starts)]


def read_set(place: Path | str) -> SampleSet:
    """Read a sample set, and check that it is complete.

    Raises:
        RequestError: the sample set does not exist.
        WorkError: some of its parts are missing.
    """
    store = open_store(place)
    if (content := read_sealed(store, RECORD)) is None:
        raise RequestError(
            f"{store.where()} is not a sample set: it has no {RECORD}. Pass the folder of a single setting, such as "
            f"RUN/evaluations/step-00001000-auto/g8-s50-own."
        )
    count, parts = content["drawing"]["num_samples"], read_receipts(store, PICTURES, part_names(content))
    drawn = sum(len(receipt["samples"]) for receipt in parts.values())
    if drawn != count:
        raise WorkError(
            f"{store.where()} has only {drawn} of {count} images. Metrics over a subset would not be comparable. Run "
            f"the same `sample` command again to draw the rest."
        )
    prompts = [Prompt(**prompt) for prompt in content["prompts"]]
    return SampleSet(place, content["drawing"], content["drawing_id"], Model(**content["model"]), prompts, parts)


def is_unfinished(place: Path | str) -> bool:
    """Return whether a sample set has been started, but some of its parts are missing."""
    store = open_store(place)
    if (content := read_sealed(store, RECORD)) is None:
        return False
    names = part_names(content)
    return len(read_receipts(store, PICTURES, names)) < len(names)


def part_names(content: dict[str, Any]) -> list[str]:
    """Return the names of all parts of a sample set, given the content of its RECORD."""
    return [f"{number:05d}" for number in range(-(-content["drawing"]["num_samples"] // content["part_size"]))]
