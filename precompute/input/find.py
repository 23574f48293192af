"""Detect the kind of an input, divide it into units, and choose its caption fields."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import PurePosixPath
from typing import Protocol, TypeVar

from precompute.input.captions import JSON_PREFIX, fields_with_text
from precompute.input.folder import KIND as IMAGE_FOLDER
from precompute.input.folder import find_folder
from precompute.input.listing import Listing, list_input
from precompute.input.mds import find_mds
from precompute.input.numbering import UNITS_INSPECTED, Found
from precompute.input.parquet import find_parquet
from precompute.input.tars import SUFFIXES, find_tars
from precompute.input.unit import IMAGE_SUFFIXES, RawSample, Unusable, escaped, unreadable
from shards.base.errors import DamagedInput, RequestError
from shards.base.table import counted

KINDS: list[Callable[[Listing], Found | None]] = [find_tars, find_mds, find_parquet, find_folder]
"""One function per kind, which returns the input's contents of that kind, or None. The first match is used, so a folder
of tars may contain other files."""
LISTED = 5
"""Number of missing units that an error lists."""
INSPECTED = 100
"""Number of samples searched for caption fields."""
LIKELY = re.compile(r"caption|text|prompt|description|title|^alt([_-]?txt)?$", re.IGNORECASE)
LONG_TEXT = 3
"""Minimum mean number of words in the captions of a field whose name does not match LIKELY."""


class Named(Protocol):
    """A unit to encode, or a unit's parts in a root to derive from."""

    @property
    def name(self) -> str:
        """Name of the unit, such as 00042."""


def find_input(address: str) -> Found:
    """List an input, and return what it contains. Raises RequestError if it contains nothing that can be encoded."""
    listing = list_input(address)
    problem: Unusable | None = None
    for find in KINDS:
        try:
            if found := find(listing):
                notes = (*found.notes, *_unread(listing, found), *([] if problem is None else [str(problem)]))
                return replace(found, notes=notes, again=partial(find_input, address))
        except (FileNotFoundError, PermissionError) as error:
            raise unreadable(error.filename or address, error) from error
        except Unusable as error:  # for example a stray file in a folder of images
            problem = problem or error
    raise problem or RequestError(f"The input {address} {_problem(listing)}")


AnyUnit = TypeVar("AnyUnit", bound=Named)


def choose_units(wanted: str, available: list[AnyUnit]) -> list[AnyUnit]:
    """Return the units that `wanted` selects, in order: `00042`, `00000-00099`, a comma-separated list of both, or
    `all`. Raises RequestError if the selection is invalid, or names a unit that does not exist."""
    if wanted == "all":
        return available
    by_name = {unit.name: unit for unit in available}
    other = next((name for name in by_name if not name.isdecimal()), None)  # such as cc12m-train-0000
    hint = f" Units whose names are not numbers, such as {other}, can only be selected with all." if other else ""
    names: list[str] = []
    for word in wanted.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word.strip())
        if not match:
            raise RequestError(
                f"--shards {wanted} is not a selection of units. Use 00042, 00000-00099, a comma-separated list of "
                f"both, or all.{hint}"
            )
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise RequestError(f"--shards {wanted}: the end of the range {word} is before its start.")
        numbers = islice(range(int(first), int(last) + 1), len(available) + LISTED + 1)  # the rest would be missing
        names += [str(number).zfill(len(first)) for number in numbers]
    missing = [name for name in names if name not in by_name]
    if missing:
        listed = ", ".join(missing[:LISTED]) + (" and more" if len(missing) > LISTED else "")
        raise RequestError(
            f"{'This unit does' if len(missing) == 1 else 'These units do'} not exist: {listed}. The input contains "
            f"{counted(len(available), 'unit')}: {available[0].name} to "
            f"{available[-1].name}.{hint}"
        )
    return [by_name[name] for name in sorted(set(names))]


def _unread(listing: Listing, found: Found) -> Iterator[str]:
    """Yield a note if the input has images or tars that are not part of what was found."""
    unread = _tars_in_subfolders(listing)
    if found.kind != IMAGE_FOLDER:
        unread += [name for name in listing.files if PurePosixPath(name).suffix[1:].lower() in IMAGE_SUFFIXES]
    if unread:
        yield (
            f"the input is read as {found.kind}. Other images and tars, such as {escaped(unread[0])}, will not be "
            f"read (files: {len(unread):,}). To encode them, run another job with `input` set to a folder that has "
            f"only them."
        )


def _tars_in_subfolders(listing: Listing) -> list[str]:
    return [name for name in listing.files if "/" in name and name.endswith(SUFFIXES)]


def _problem(listing: Listing) -> str:
    """Describe an input that contains nothing that can be encoded, to follow its address in a sentence."""
    if not listing.files and not listing.linked_folders:
        return (
            "does not exist, or contains no files apart from hidden files and latents roots. Set `input` to the folder "
            "of your images or tars."
        )
    if tars := _tars_in_subfolders(listing):
        return (
            f"has tars in subfolders only, such as {escaped(tars[0])}, and these are not searched. Set `input` to the "
            f"folder that directly contains the tars."
        )
    return (
        f"contains {_contents(listing)}, but no images, tars, parquet files with an image column, or MDS files with "
        f"images. Set `input` to the folder of your images. docs/how-to/your-own-data.md describes the kinds of input."
    )


def _contents(listing: Listing) -> str:
    suffixes = Counter(PurePosixPath(name).suffix or "no suffix" for name in listing.files)
    shown = ", ".join(f"{suffix}: {count:,}" for suffix, count in suffixes.most_common(5))
    linked = f", and {counted(len(listing.linked_folders), 'link')} to folders" if listing.linked_folders else ""
    return f"{counted(len(listing.files), 'file')}{f' ({shown})' if shown else ''}{linked}"


def choose_caption_fields(found: Found, max_bytes: int) -> list[str]:
    """Return the caption field of an input, judging by its first samples. Raises RequestError unless exactly
    one field seems to contain captions."""
    address = found.listing.given
    samples = list(islice(found.heads(max_bytes), INSPECTED))
    if not samples:
        _refuse_damage(found, max_bytes)
        raise RequestError(f"The first units of {address} contain no samples. Check these files.")
    texts = _texts(samples)
    frequent = {name: values for name, values in texts.items() if len(values) >= len(samples) / 2}
    if "txt" in frequent:
        return ["txt"]
    likely = [name for name in frequent if LIKELY.search(name.removeprefix(JSON_PREFIX))]
    if not likely:
        likely = [name for name, values in frequent.items() if _mean_words(values) >= LONG_TEXT]
    if len(likely) == 1:
        return likely
    examples = "".join(
        f"\n  {name}: {values[0][:100]!r}" for name, values in texts.items() if name in likely or not likely
    )
    if not likely:
        shown = f" Fields with text:{examples}" if examples else ""
        raise RequestError(
            f"No captions were found in the first {counted(len(samples), 'sample')} of {address}, which is read as "
            f"{found.kind}. Put a text file beside each image, or name a field with --captions.{shown}"
        )
    raise RequestError(
        f"{address} has {len(likely)} fields that may be captions:{examples}\nChoose one, or list several separated "
        f"by commas; training then draws one at random each time it uses an image:\n"
        f'  make precompute SHARD=all ARGS="--input {address} --captions {likely[0]}"'
    )


def _refuse_damage(found: Found, max_bytes: int) -> None:
    """Raise RequestError if one of the first units is damaged, so that the message says how."""
    for unit in islice(found.units(), UNITS_INSPECTED):
        try:
            with unit.open(max_bytes) as source:
                for _ in source.samples():
                    pass
        except DamagedInput as error:
            raise RequestError(
                f"The first units of {found.listing.given} have no intact samples, so no captions were found: {error}"
            ) from error


def _texts(samples: Sequence[RawSample]) -> dict[str, list[str]]:
    """Map each caption field to its non-empty texts."""
    texts: dict[str, list[str]] = {}
    for sample in samples:
        for field, text in fields_with_text(sample):
            texts.setdefault(field, []).append(text)
    return texts


def _mean_words(texts: Sequence[str]) -> float:
    return sum(len(text.split()) for text in texts) / len(texts)
