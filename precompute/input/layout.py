"""Parse all headers of a tar, to group its members by key and to detect damage.

Python's tarfile finds the headers and skips all other bytes. If a header does not start where the previous member
ended, data was lost. Nothing is ever extracted: folders and devices are skipped, links are not followed, and only the
last component of a member's path is used.
"""

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

from precompute.input.unit import CAPTION_SUFFIXES, IMAGE_SUFFIXES, SAMPLE_SUFFIXES, escaped
from shards.base.errors import DamagedInput
from shards.base.table import counted

MAGIC = {
    re.compile(rb"\x1f\x8b"): "gzip",
    re.compile(rb"BZh[1-9]1AY&SY"): "bz2",  # the first four bytes alone may also start a member's name
    re.compile(rb"\xfd7zXZ"): "xz",
    re.compile(rb"\x28\xb5\x2f\xfd"): "zstd",
}
MAGIC_BYTES = 10
"""Number of bytes at the start of a file that `MAGIC` needs."""
DECOMPRESSIBLE = {"gzip", "bz2", "zstd"}
REPLACE = "Download this tar again or, if you created it yourself, recreate it."
"""Advice at the end of error messages about a damaged tar."""
SORT = "Recreate it, sorted by name: tar --sort=name -cf NAME.tar -C FOLDER ."
RENAME = "Recreate it with a unique key for each sample."
REMOVE_DOTS = "Recreate it with keys without dots, or set tars.policy to salvage to leave these files out."
STORE_WHOLE = "Recreate it with tar --dereference --hard-dereference, and without --sparse."
BLOCK = tarfile.BLOCKSIZE
EXTENDED = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
MAX_EXTENDED_BYTES = 1 << 20
"""Maximum size of a GNU long name or pax header, because tarfile reads the whole header into memory."""
HEADER_ERRORS = (tarfile.TarError, ValueError, OverflowError, IndexError)
PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)


@dataclass(frozen=True)
class Member:
    """A file in a tar, located by its byte offset and size."""

    name: str
    offset: int
    size: int
    is_whole: bool = True
    """Whether the file's bytes are at `offset`; false for links and sparse files, which are never read."""


@dataclass
class TarLayout:
    """A tar's members and damage."""

    members: dict[str, dict[str, Member]] = field(default_factory=dict)
    """Key → suffix → member; keys in the order of their first members."""
    lost: dict[str, str] = field(default_factory=dict)
    """Key → reason why its sample is unusable."""
    damage: dict[str, str] = field(default_factory=dict)
    """Descriptions of the damage, each phrased to follow the tar's name in a sentence → advice, as a further sentence.
    Empty for an intact tar."""


def read_layout(path: Path, address: str) -> TarLayout:
    """Read every header of the uncompressed tar at `path`, a copy of the tar at `address`. Raises DamagedInput if its
    extended headers are nested too deeply.

    A sample next to damaged bytes is kept only if it has an image, a caption and JSON. If other samples separate the
    members of a sample, it is kept, but this counts as damage. If a key occurs twice with the same kind of member, both
    samples are lost. Images with a caption such as `a.1.jpg` and `a.1.txt` are lost if there is a sample `a`, because
    they may belong to it. A sample is also lost if one of its files is a link, as GNU tar writes for further names of a
    hard-linked file, or a sparse file.
    """
    layout, size = TarLayout(), path.stat().st_size
    end, key, last_added = 0, "", ""
    keys_near_damage: list[str] = []
    with path.open("rb") as file:
        for header, next_header in read_headers(address, file, size):
            before, (key, suffix) = key, split_name(header.name)
            if header.offset != end and header.offset != after_global_header(file, end):
                layout.damage[f"is damaged: bytes {end} to {header.offset} do not belong to any tar member"] = REPLACE
                keys_near_damage += [before, key]
            end = next_header
            if end > size:
                layout.damage[f"is truncated within the member {header.name!r}"] = REPLACE
                keys_near_damage.append(key)
            elif key and ((is_whole := _is_whole(header)) or _is_incomplete(header, suffix)):
                member = Member(header.name, header.offset_data, header.size, is_whole)
                _add_member(layout, key, suffix, last_added, member)
                last_added = key
        if end <= size and (damage := check_end_marker(file, end)):
            layout.damage[damage] = REPLACE
            keys_near_damage.append(key)
    split = split_dotted(layout)
    _report_incomplete(layout)
    # if the tar has .txt files, they are the captions, so a .caption file cannot replace a lost .txt
    captions = {"txt"} if any("txt" in suffixes for suffixes in layout.members.values()) else CAPTION_SUFFIXES
    for key in [key for first in keys_near_damage for key in split.get(first, [first])]:
        suffixes = layout.members.get(key, ())
        if key and any(kind.isdisjoint(suffixes) for kind in (IMAGE_SUFFIXES, captions, {"json"})):
            layout.lost.setdefault(key, "one of its members is damaged or missing")
    return layout


def _is_whole(header: tarfile.TarInfo) -> bool:
    return header.type in PLAIN and not header.issparse()


def _is_incomplete(header: tarfile.TarInfo, suffix: str) -> bool:
    """Return whether a member is a link or a sparse file instead of the image, caption or JSON that its name says."""
    return suffix.rpartition(".")[2] in SAMPLE_SUFFIXES and (header.islnk() or header.issym() or header.issparse())


def _report_incomplete(layout: TarLayout) -> None:
    """Record samples as lost if one of their files is a link or a sparse file."""
    names: list[str] = []
    for key, members in layout.members.items():
        for suffix, member in members.items():
            if suffix in SAMPLE_SUFFIXES and not member.is_whole:
                names.append(member.name)
                layout.lost.setdefault(key, "one of its files is a link or a sparse file")
    if names:
        stored = f"stores {counted(len(names), 'file')} as links or sparse files, which are not read"
        layout.damage[f"{stored}, starting with {names[0]!r}"] = STORE_WHOLE


def _add_member(layout: TarLayout, key: str, suffix: str, previous_key: str, member: Member) -> None:
    members = layout.members.setdefault(key, {})
    if suffix in members or (suffix in IMAGE_SUFFIXES and not IMAGE_SUFFIXES.isdisjoint(members)):
        layout.damage[f"is ambiguous: the key {key} occurs twice, so its members cannot be assigned to samples"] = (
            RENAME
        )
        layout.lost[key] = "its key occurs twice"
    elif members and key != previous_key:
        layout.damage[f"is not in order: the members of the key {key} are separated by other samples"] = SORT
    members.setdefault(suffix, member)


def split_dotted(layout: TarLayout) -> dict[str, list[str]]:
    """Split names such as `a.b.jpg` and `a.b.txt` at the last dot, if no member of `a` has a suffix without dots.
    Return a dict from each key that was split to its new keys.

    All other keys end at the first dot, as in webdataset: if there is an `a.jpg`, then `a.seg.png` is another member of
    the sample `a`.
    """
    split: dict[str, list[str]] = {}
    grouped, layout.members = layout.members, {}
    for key, members in grouped.items():
        if not all("." in suffix for suffix in members):
            layout.members[key] = members
            _report_nested(layout, key, members)
            continue
        why_lost, before = layout.lost.pop(key, None), ""
        split[key] = []
        for member in members.values():
            name = split_name(member.name, at_last_dot=True)
            _add_member(layout, *name, before, member)
            before = name[0]
            split[key].append(before)
            if why_lost:
                layout.lost[name[0]] = why_lost
    return split


def _report_nested(layout: TarLayout, key: str, members: dict[str, Member]) -> None:
    """Record as damage if members of the sample `a`, such as `a.1.jpg` and `a.1.txt`, could also be a sample `a.1`."""
    nested: dict[str, list[str]] = {}
    for suffix, member in members.items():
        if "." in suffix:
            name, last = split_name(member.name, at_last_dot=True)
            nested.setdefault(name, []).append(last)
    # without a text file, the caption of the sample is in its JSON
    captions = CAPTION_SUFFIXES if not CAPTION_SUFFIXES.isdisjoint(members) else CAPTION_SUFFIXES | {"json"}
    for name, suffixes in nested.items():
        if not (IMAGE_SUFFIXES.isdisjoint(suffixes) or captions.isdisjoint(suffixes)):
            files = ", ".join(f"{name}.{suffix}" for suffix in suffixes)
            damage = f"is ambiguous: {files} may be the sample {name}, or further files of the sample {key}"
            layout.damage[damage] = REMOVE_DOTS
            layout.lost[name] = f"its files may belong to the sample {key}"


class Header(tarfile.TarInfo):
    """A `TarInfo` that refuses extended headers so large that tarfile would run out of memory reading them."""

    def _proc_member(self, tar: tarfile.TarFile) -> Self:
        if self.type in EXTENDED and self.size > MAX_EXTENDED_BYTES:
            raise tarfile.InvalidHeaderError(f"extended header of {self.size} bytes")  # type: ignore[attr-defined]
        return super()._proc_member(tar)  # type: ignore[misc]


def read_headers(address: str, file: BinaryIO, size: int) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yield each readable header and the offset where the next one should start, skipping unreadable bytes. Raises
    DamagedInput if a chain of extended headers exceeds the recursion limit, because tarfile recurses at each header."""
    try:
        try:
            tar = tarfile.TarFile(fileobj=file, ignore_zeros=True, tarinfo=Header)
        except HEADER_ERRORS:
            return
        first = True  # the constructor has already read the first header
        while first or tar.offset < size:
            first, at = False, tar.offset
            try:
                header = tar.next()
            except HEADER_ERRORS:
                tar.offset = max(at, tar.offset) + BLOCK
                continue
            if header is None:
                return
            if header.size < 0 or tar.offset <= header.offset:  # a negative size would make tarfile loop forever
                tar.offset = header.offset + BLOCK
                continue
            yield header, tar.offset
    except RecursionError:
        raise DamagedInput(f"{address} is damaged: its extended headers are nested too deeply. {REPLACE}") from None


def after_global_header(file: BinaryIO, offset: int) -> int:
    """Return the offset after the global pax header at `offset`, or `offset` itself if there is none. tarfile does not
    report these headers."""
    file.seek(offset)
    try:
        header = tarfile.TarInfo.frombuf(file.read(BLOCK), "utf-8", "surrogateescape")
    except tarfile.TarError:
        return offset
    return offset + BLOCK + -(-header.size // BLOCK) * BLOCK if header.type == tarfile.XGLTYPE else offset


def split_name(name: str, at_last_dot: bool = False) -> tuple[str, str]:
    """Split a path such as `folder/000420017.jpg` into key and suffix; bytes that are not UTF-8 are escaped."""
    name = escaped(name).rpartition("/")[2]
    key, _, suffix = name.rpartition(".") if at_last_dot else name.partition(".")
    return key, suffix.lower()


def compression_of(path: Path, address: str) -> str | None:
    """Return how the local copy of the tar at `address` is compressed, by its first bytes: `gzip`, `bz2`, `zstd`, or
    None. Raises DamagedInput for xz, which pyarrow cannot decompress."""
    with path.open("rb") as file:
        found = compression_at(file.read(MAGIC_BYTES))
    if found is not None and found not in DECOMPRESSIBLE:
        raise DamagedInput(f"{address} is compressed with {found}. Decompress it in place.")
    return found


def compression_at(start: bytes) -> str | None:
    """Return how a file that starts with these bytes is compressed, or None."""
    return next((name for magic, name in MAGIC.items() if magic.match(start)), None)


def check_end_marker(file: BinaryIO, offset: int) -> str:
    """Check that at least two zero blocks, and nothing else, follow `offset`, where the last member ends. Return a
    description of the damage, or an empty string if there is none."""
    length = 0
    file.seek(offset)
    while block := file.read(1 << 20):
        if block.count(0) != len(block):
            return f"is damaged: the bytes after {offset} are neither a member nor the end-of-archive marker"
        length += len(block)
    return "" if length >= 2 * BLOCK else "is truncated: the end-of-archive marker is missing"
