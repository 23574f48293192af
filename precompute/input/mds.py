"""MDS datasets with a column of images, as users of mosaicml/diffusion have them.

Image files are taken out of a sample undecoded. Of the other columns, only text, numbers, JSON and plain bytes are
read: pickled objects may run code, and arrays and other images are not needed. streaming is imported late, because no
other input needs it.
"""

import io
import json
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from precompute.input.listing import Listing
from precompute.input.numbering import Found, Member, NumberedUnit
from precompute.input.parquet import IMAGE_NAMES, KEY_NAMES, key_text
from precompute.input.unit import RawSample, Unusable, escaped
from shards.base.errors import RequestError

INDEX = "index.json"
FILES = {"jpeg", "png", "bytes"}
"""Encodings of columns whose bytes are an image file."""
PNG_MODES = {"1", "L", "LA", "I;16", "P", "RGB", "RGBA"}
PIXELS = {"pil"}
"""Encodings of columns with decoded pixels, which are losslessly converted to PNG or TIFF."""
PLAIN = {
    *("str", "json", "str_int", "str_float", "str_decimal", "int", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
}
"""Encodings of columns that become a sample's metadata."""


@dataclass(frozen=True)
class MdsUnit(NumberedUnit):
    """A group of MDS files."""

    entries: dict[str, tuple[str, dict[str, Any]]]
    """Member → folder of the index.json that lists it, and its entry there."""

    def read(self, member: Member, max_bytes: int) -> Iterator[RawSample]:
        if member.name not in self.entries:
            raise FileNotFoundError(f"no {INDEX} lists it")
        folder, entry = self.entries[member.name]
        raw, packed = entry["raw_data"], entry["zip_data"]
        stored = packed or raw
        data = self.store.read(folder + stored["basename"])
        _check_bytes(data, stored)
        if packed:
            from streaming.base.compression import decompress

            try:
                data = decompress(entry["compression"], data)
            except Exception as error:  # each algorithm has its own exceptions
                raise ValueError(f"it cannot be decompressed: {error}") from error
            _check_bytes(data, raw)
        return _samples(member.name, data, entry, max_bytes)


def _samples(name: str, data: bytes, entry: dict[str, Any], max_bytes: int) -> Iterator[RawSample]:
    count = entry["samples"]
    offsets = np.frombuffer(data, np.uint32, count + 2)[1:] if len(data) >= 4 * (count + 2) else np.zeros(0, np.uint32)
    if not len(offsets) or offsets[-1] != len(data) or (np.diff(offsets.astype(np.int64)) < 0).any():
        raise ValueError("its offsets are inconsistent")
    image = image_column(entry)
    for place in range(count):
        values = _columns(data[offsets[place] : offsets[place + 1]], entry)
        key = next((key_text(values.pop(column)) for column in KEY_NAMES if column in values), None)
        sample = RawSample(key or escaped(f"{name}/{place}"))
        picture = values.pop(image) if image else None
        if isinstance(picture, bytes) and len(picture) > max_bytes:
            sample.oversized = f"the image of {sample.key} has {len(picture)} bytes, more than {max_bytes}"
        else:
            sample.image = picture
        sample.metadata = values
        yield sample


def _check_bytes(data: bytes, expected: dict[str, Any]) -> None:
    from streaming.base.hashing import get_hash

    if len(data) != expected["bytes"]:
        raise ValueError(f"it has {len(data)} bytes instead of {expected['bytes']}")
    for name, value in expected["hashes"].items():
        if get_hash(name, data) != value:
            raise ValueError(f"its {name} differs from the one in {INDEX}")


def _columns(data: bytes, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the image of a sample as a file, and its other columns of bytes or a PLAIN encoding."""
    from streaming.base.format.mds.encodings import mds_decode

    variable = sum(not size for size in entry["column_sizes"])
    lengths = iter(np.frombuffer(data, np.uint32, variable).tolist())
    place, values, image = 4 * variable, {}, image_column(entry)
    for name, encoding, size in zip(
        entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True
    ):
        length = size or next(lengths)
        value = data[place : place + length]
        place += length
        if name == image:
            values[name] = value if encoding in FILES else _as_file(encoding, value)
        elif encoding == "bytes":
            values[name] = value
        elif encoding in PLAIN:
            decoded = mds_decode(encoding, value)
            values[name] = decoded.item() if isinstance(decoded, np.generic) else decoded
    return values


def _as_file(encoding: str, value: bytes) -> bytes:
    """Convert decoded pixels to an image file without loss. Values that are not pixels stay as they are, and are later
    rejected like any other file that is not an image."""
    from streaming.base.format.mds.encodings import mds_decode

    try:
        picture, buffer = mds_decode(encoding, value), io.BytesIO()
        picture.save(buffer, "PNG" if picture.mode in PNG_MODES else "TIFF")
    except (ValueError, LookupError, OSError):
        return value
    return buffer.getvalue()


def image_column(entry: dict[str, Any]) -> str | None:
    """Return the name of a file's column with the images, or None if there is none."""
    by_name = dict(zip(entry["column_names"], entry["column_encodings"], strict=True))
    named = [name for name in IMAGE_NAMES if by_name.get(name) in FILES | PIXELS]
    typed = [name for name, encoding in by_name.items() if encoding in FILES | PIXELS and encoding != "bytes"]
    return next(iter(named + typed), None)


def find_mds(listing: Listing) -> Found | None:
    """Find the MDS files with images that an index.json lists. Raises RequestError if one of several indexes cannot be
    read, and Unusable if all of them are."""
    members: dict[str, Member] = {}
    entries: dict[str, tuple[str, dict[str, Any]]] = {}
    problems = []
    for name in listing.files:
        if PurePosixPath(name).name != INDEX:
            continue
        folder = name.removesuffix(INDEX)
        try:
            index = json.loads(listing.store.read(name))
            if not isinstance(index, dict) or "shards" not in index:
                continue  # another program's index
            for entry in index["shards"]:
                raw = entry["raw_data"]
                for file in filter(None, (entry["zip_data"], raw)):
                    place = posixpath.normpath(folder + file["basename"])
                    if place.startswith(("/", "../")):
                        raise ValueError(f"{file['basename']} is outside of the input")
                if entry["format"] == "mds" and entry["samples"] and image_column(entry):
                    members[place], entries[place] = Member(place, raw["bytes"], entry["samples"]), (folder, entry)
        except (ValueError, LookupError, TypeError) as error:
            problems.append(
                f"{listing.store.where(name)} is not a valid index of an MDS dataset ({type(error).__name__}: "
                f"{error}). Restore this file, or move it to another folder."
            )
    if problems:
        raise (RequestError if members else Unusable)(problems[0])

    if members and find_spec("streaming") is None:
        raise RequestError(
            f"{listing.address} is an MDS dataset, which cannot be read without the package mosaicml-streaming. Run "
            f"`pip install mosaicml-streaming`."
        )

    def make(name: str, members: tuple[Member, ...]) -> MdsUnit:
        own = {member.name: entries[member.name] for member in members if member.name in entries}
        return MdsUnit(name, listing.address, listing.store, members, own)

    def folder_of(member: Member) -> str:
        return member.name.rpartition("/")[0]

    ordered = [members[name] for name in sorted(members)]
    return Found("an MDS dataset", listing, ordered, make, boundary=folder_of) if ordered else None
