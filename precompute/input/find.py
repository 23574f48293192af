"""Detect the kind of an input, divide it into units, and choose its caption fields."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import PurePosixPath
from typing import Protocol, TypeVar

from precompute.input.captions import JSON_PREFIX
from precompute.input.folder import find_folder
from precompute.input.listing import Listing, list_input
from precompute.input.mds import find_mds
from precompute.input.numbering import Found
from precompute.input.parquet import find_parquet
from precompute.input.tars import find_tars
from precompute.input.unit import RawSample, Unusable
from shards.base.errors import RequestError
from shards.base.table import counted

KINDS: list[Callable[[Listing], Found | None]] = [find_tars, find_mds, find_parquet, find_folder]
"""One function per kind, which returns the input's contents of that kind, or None. The first match is used, so a folder
of tars may contain other files."""
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
                notes = found.notes if problem is None else (*found.notes, str(problem))
                return replace(found, notes=notes, again=partial(find_input, address))
        except Unusable as error:  # for example a stray file in a folder of images
            problem = problem or error
    raise problem or RequestError(
        f"The input {address} contains {_contents(listing)}, but no images, tars, parquet files with an image column, "
        f"or MDS files with images. Set `input` to the folder of your images."
    )


AnyUnit = TypeVar("AnyUnit", bound=Named)


def choose_units(wanted: str, available: list[AnyUnit]) -> list[AnyUnit]:
    """Return the units that `wanted` selects, in order: `00042`, `00000-00099`, a comma-separated list of both, or
    `all`. Raises RequestError if the selection is invalid, or names a unit that does not exist."""
    if wanted == "all":
        return available
    by_name = {tar.name: tar for tar in available}
    names: list[str] = []
    for word in wanted.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word.strip())
        if not match:
            raise RequestError(
                f"--shards {wanted} is not a selection of units. Use 00042, 00000-00099, a comma-separated list of "
                f"both, or all."
            )
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise RequestError(f"--shards {wanted}: the end of the range {word} is before its start.")
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    missing = [name for name in names if name not in by_name]
    if missing:
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise RequestError(
            f"{'This unit does' if len(missing) == 1 else 'These units do'} not exist: {listed}. The input contains "
            f"{counted(len(available), 'unit')}: {available[0].name} to "
            f"{available[-1].name}."
        )
    return [by_name[name] for name in sorted(set(names))]


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
        raise RequestError(f"The first units of {address} have no intact samples. Check these files.")
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
            f"No captions were found in the first {counted(len(samples), 'sample')} of {address}. Put a text file "
            f"beside each image, or name a field with --captions.{shown}"
        )
    raise RequestError(
        f"{address} has {len(likely)} fields that may be captions:{examples}\nChoose one, or list several separated "
        f"by commas; training then draws one at random each time it uses an image:\n"
        f'  make precompute SHARD=all ARGS="--input {address} --captions {likely[0]}"'
    )


def _texts(samples: Sequence[RawSample]) -> dict[str, list[str]]:
    """Map each caption field to its non-empty texts."""
    texts: dict[str, list[str]] = {}
    for sample in samples:
        if sample.caption and (text := sample.caption.decode(errors="replace").strip()):
            texts.setdefault("txt", []).append(text)
        for name, value in sample.metadata.items():
            values = value if isinstance(value, list) else [value]
            for place, text in enumerate(values):
                if isinstance(text, str) and text.strip():
                    field = f"{JSON_PREFIX}{name}{f'[{place}]' if isinstance(value, list) else ''}"
                    texts.setdefault(field, []).append(text.strip())
    return texts


def _mean_words(texts: Sequence[str]) -> float:
    return sum(len(text.split()) for text in texts) / len(texts)
