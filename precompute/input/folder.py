"""Folders of image files, with a text file beside each image or with a table of captions (Hugging Face's imagefolder).

pictures/cat.jpg, pictures/cat.txt      or cat.caption, or cat.json
pictures/metadata.jsonl                 or .csv or .parquet: {"file_name": "cat.jpg", "text": "a cat"}
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from precompute.input.listing import Listing
from precompute.input.numbering import Found, Member
from precompute.input.rows import load_rows
from precompute.input.unit import (
    CAPTION_SUFFIXES,
    IMAGE_SUFFIXES,
    Policy,
    RawSample,
    Unit,
    escaped,
    parse_json,
)
from shards.base.errors import DamagedInput, RequestError
from shards.base.store import Store
from shards.base.table import counted

KIND = "a folder of images"
TABLE = re.compile(r"(.*/)?(metadata\.(jsonl|csv|parquet)|meta_(cap|cap_dd|clean|lat)\.json)")
READ_AHEAD = 32
"""Number of images that are read together, with the files beside them."""
MAX_TABLES_CHECKED = 100


@dataclass(frozen=True)
class FolderUnit(Unit):
    """A group of image files."""

    store: Store
    members: tuple[Member, ...]
    beside: dict[str, dict[str, int]]
    """Image → text and JSON files with the same name → size in bytes."""
    tables: dict[str, tuple[str, int]]
    """Image → name and size of the table in its folder, or in the nearest folder above."""

    def _samples(self, max_bytes: int, policy: Policy) -> Iterator[RawSample]:
        for first in range(0, len(self.members), READ_AHEAD):
            sizes = {
                member.name: {member.name: member.bytes, **self.beside.get(member.name, {})}
                for member in self.members[first : first + READ_AHEAD]
            }
            wanted = [name for files in sizes.values() if max(files.values()) <= max_bytes for name in files]
            found = self.store.read_many(wanted)
            lengths = {name: len(data) for name, data in found.items()}
            for name, files in sizes.items():
                sample = RawSample(escaped(name))
                large = next((file for file, size in files.items() if size > max_bytes), None)
                wrong = next((file for file, size in files.items() if lengths.get(file) != size), None)
                if large is not None:
                    sample.oversized = f"the file {escaped(large)} has {files[large]} bytes, more than {max_bytes}"
                elif wrong is not None:
                    problem = "has changed since it was listed" if wrong in found else "no longer exists"
                    sample.lost = f"the file {escaped(wrong)} {problem}"
                    if policy == "reject":
                        raise DamagedInput(
                            f"{self.store.where(escaped(wrong))} {problem}, but it belongs to unit {self.name}. "
                            f"Restore it, or set tars.policy to salvage, which records lost samples."
                        )
                else:
                    sample = self._sample(name, found)
                yield sample

    def _sample(self, name: str, found: dict[str, bytes]) -> RawSample:
        sample = RawSample(escaped(name), found[name])
        for other in self.beside.get(name, ()):
            if _suffix(other) == "json":
                sample.metadata |= parse_json(found[other])
            else:
                sample.caption = found[other]
        if name in self.tables:
            table, num_bytes = self.tables[name]
            path = str(PurePosixPath(name).relative_to(PurePosixPath(table).parent))
            rows = load_rows(self.store.where(), table, num_bytes)
            sample.metadata |= rows.get(path) or rows.get(_stem(path))  # kohya's scripts omit the suffix
        return sample


def find_folder(listing: Listing) -> Found | None:
    """Find the image files in a folder and the folders below. Raises RequestError if a folder has two tables, or a
    table cannot be read."""
    members = [Member(name, size) for name, size in listing.files.items() if _suffix(name) in IMAGE_SUFFIXES]
    stems = {_stem(member.name) for member in members}
    tables = _tables(listing, stems)
    table_names = {table for table, _ in tables.values()}
    beside: dict[str, dict[str, int]] = {}
    for name, size in listing.files.items():
        if _suffix(name) in CAPTION_SUFFIXES | {"json"} and name not in table_names:
            beside.setdefault(_stem(name), {})[name] = size

    def make(name: str, members: tuple[Member, ...]) -> FolderUnit:
        images = [member.name for member in members]
        own = {image: files for image in images if (files := beside.get(_stem(image)))}
        rows = {image: table for image in images if (table := _nearest(image, tables))}
        return FolderUnit(name, listing.address, listing.store, members, own, rows)

    if not members:
        return None
    found = Found(KIND, listing, members, make)
    return replace(found, notes=tuple(_notes(listing, tables, stems)))


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix[1:].lower()


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _tables(listing: Listing, stems: set[str]) -> dict[str, tuple[str, int]]:
    """Map each folder that contains a table to the table's name and size."""
    tables: dict[str, tuple[str, int]] = {}
    for name, size in listing.files.items():
        if TABLE.fullmatch(name) and _stem(name) not in stems:
            folder = str(PurePosixPath(name).parent)
            if folder in tables:
                raise RequestError(
                    f"{listing.store.where(folder)} contains two tables, {tables[folder][0]} and {name}. Keep one."
                )
            tables[folder] = name, size
    return tables


def _notes(listing: Listing, tables: dict[str, tuple[str, int]], stems: set[str]) -> Iterator[str]:
    """Yield a note for each table with rows that no image has."""
    for folder, (table, size) in list(tables.items())[:MAX_TABLES_CHECKED]:
        try:
            rows = load_rows(listing.store.where(), table, size).stored
        except DamagedInput as error:
            raise RequestError(str(error)) from error
        prefix = "" if folder == "." else f"{folder}/"
        unused = [row for row in rows if f"{prefix}{row}" not in listing.files and f"{prefix}{row}" not in stems]
        if unused:
            yield (
                f"{counted(len(unused), 'row')} of {len(rows)} in {table} name images that do not exist, such as "
                f"{unused[0]!r}."
            )


def _nearest(name: str, tables: dict[str, tuple[str, int]]) -> tuple[str, int] | None:
    return next((tables[str(folder)] for folder in PurePosixPath(name).parents if str(folder) in tables), None)
