"""What a tar's headers say: members by key, and every place where it is not what a downloader wrote.

Python's tarfile finds the headers, and goes on to the next one after bytes that are none; where a header begins that is
not where the last member ended, something was lost. Nothing is ever extracted: links, folders and devices are passed
over, and of a name only the last component counts.
"""

import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

from shards.base.errors import DamagedInput

IMAGE_SUFFIXES = {"jpg", "jpeg", "png", "webp", "gif", "tif", "tiff", "avif"}
MAGIC = {
    re.compile(rb"\x1f\x8b"): "gzip",
    re.compile(rb"BZh[1-9]1AY&SY"): "bzip2",  # the first four bytes alone may begin a name
    re.compile(rb"\xfd7zXZ"): "xz",
    re.compile(rb"\x28\xb5\x2f\xfd"): "zstd",
}
Item = TypeVar("Item")
BLOCK = tarfile.BLOCKSIZE
OCTAL = re.compile(rb"[0-7]+")
EXTENDED = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
MAX_EXTENDED_BYTES = 1 << 20
"""Of a long name, or of what pax says of a member: tarfile reads all of it into memory."""
HEADER_ERRORS = (tarfile.TarError, ValueError, OverflowError, IndexError)
PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)


@dataclass(frozen=True)
class Member:
    """One file of a tar, by the place of its bytes."""

    name: str
    offset: int
    size: int


@dataclass
class Layout:
    """The members of a tar, and what is wrong with it."""

    members: dict[str, dict[str, Member]] = field(default_factory=dict)
    """Key → suffix → member; keys in the order of their first members."""
    lost: dict[str, str] = field(default_factory=dict)
    """Key → why its sample is not sound."""
    damage: list[str] = field(default_factory=list)
    """What is wrong, in words that go on from the tar's name; none where it is whole."""


def read_layout(path: Path) -> Layout:
    """Read every header of the tar at `path`.

    A sample that has a damaged place before, in or after it is sound if picture, caption and JSON are all there. One
    whose members are apart is put together. Where a key comes twice with the same kind of member, neither is sound.

    Raises:
        DamagedInput: it is compressed.
    """
    layout, size = Layout(), path.stat().st_size
    end, key, placed = 0, "", ""
    beside_damage: list[str] = []
    with path.open("rb") as file:
        refuse_compressed(path, file)
        for header, next_header in not_too_deep(path, read_headers(file, size)):
            before, (key, suffix) = key, split_name(header.name)
            if header.offset != end and header.offset != after_global_header(file, end):
                layout.damage.append(f"is damaged: bytes {end} to {header.offset} of it are no members")
                beside_damage += [before, key]
            end = next_header
            if end > size:
                layout.damage.append(f"is cut short within {header.name!r}")
                beside_damage.append(key)
            elif key and header.type in PLAIN and not header.issparse():
                _place(layout, key, suffix, placed, Member(header.name, header.offset_data, header.size))
                placed = key
        if end <= size and (damage := damage_at_end(file, end)):
            layout.damage.append(damage)
            beside_damage.append(key)
    split = split_dotted(layout)
    for key in [key for first in beside_damage for key in split.get(first, [first])]:
        kinds = {"picture" if suffix in IMAGE_SUFFIXES else suffix for suffix in layout.members.get(key, ())}
        if key and not {"picture", "txt", "json"} <= kinds:
            layout.lost.setdefault(key, "a member of it is damaged or missing")
    return layout


def _place(layout: Layout, key: str, suffix: str, before: str, member: Member) -> None:
    members = layout.members.setdefault(key, {})
    if suffix in members or (suffix in IMAGE_SUFFIXES and not IMAGE_SUFFIXES.isdisjoint(members)):
        layout.damage.append(f"is not sound: the key {key} comes twice, so its samples cannot be told apart")
        layout.lost[key] = "its key comes twice"
    elif members and key != before:
        layout.damage.append(f"is not in order: the key {key} comes twice, with other samples between")
    members.setdefault(suffix, member)


def split_dotted(layout: Layout) -> dict[str, list[str]]:
    """Split members such as `a.b.jpg` and `a.b.txt` into samples by their last dot, where no member of `a` has a plain
    suffix; returns the new keys of each that was split.

    Elsewhere a key ends at the first dot, as in webdataset: beside `a.jpg`, `a.seg.png` is a further member of `a`.
    """
    split: dict[str, list[str]] = {}
    grouped, layout.members = layout.members, {}
    for key, members in grouped.items():
        if not all("." in suffix for suffix in members):
            layout.members[key] = members
            continue
        why_lost, before = layout.lost.pop(key, None), ""
        split[key] = []
        for member in members.values():
            name = split_name(member.name, at_last_dot=True)
            _place(layout, *name, before, member)
            before = name[0]
            split[key].append(before)
            if why_lost:
                layout.lost[name[0]] = why_lost
    return split


class Header(tarfile.TarInfo):
    """tarfile's, read in a third of the time where it is a plain file's, as nearly all are.

    Of such a header only name, size and checksum are read; tarfile sees to all others.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """As `tarfile.TarInfo.frombuf`."""
        return cls._read(super().frombuf, buf, encoding, errors)

    @classmethod
    def _frombuf(cls, buf: bytes, encoding: str, errors: str, **options: Any) -> Self:
        """What later releases of Python call in its place."""
        return cls._read(partial(super()._frombuf, **options), buf, encoding, errors)  # type: ignore[misc]

    @classmethod
    def _read(cls, by_tarfile: Callable[..., Self], buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        size, checksum = buf[124:136].rstrip(b"\0 "), buf[148:156].rstrip(b"\0 ")
        if (
            len(buf) == BLOCK
            and buf[156] == ord(tarfile.REGTYPE)
            and buf[345] == 0  # no prefix to the name
            and OCTAL.fullmatch(size)
            and OCTAL.fullmatch(checksum)
            and int(checksum, 8) == sum(buf) - sum(buf[148:156]) + 8 * ord(" ")
        ):
            header = cls(buf[:100].partition(b"\0")[0].decode(encoding, errors))
            header.size, header.chksum = int(size, 8), int(checksum, 8)
            return header
        header = by_tarfile(buf, encoding, errors)
        if header.type in EXTENDED and header.size > MAX_EXTENDED_BYTES:
            raise tarfile.InvalidHeaderError(f"of {header.size} bytes")  # type: ignore[attr-defined]
        return header


def read_headers(file: BinaryIO, size: int) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Every header that can be read, and where the next one should be; what lies between is passed over."""
    try:
        tar = tarfile.TarFile(fileobj=file, ignore_zeros=True, tarinfo=Header)
    except HEADER_ERRORS:
        return
    first = True  # has been read already
    while first or tar.offset < size:
        first, at = False, tar.offset
        try:
            header = tar.next()
        except HEADER_ERRORS:
            tar.offset = max(at, tar.offset) + BLOCK
            continue
        if header is None:
            return
        if header.size < 0 or tar.offset <= header.offset:  # a size below zero leads tarfile in circles
            tar.offset = header.offset + BLOCK
            continue
        yield header, tar.offset


def not_too_deep(path: Path, headers: Iterator[Item]) -> Iterator[Item]:
    """`headers`, which tarfile reads by recursion where extended ones follow each other.

    Raises:
        DamagedInput: too many do.
    """
    try:
        yield from headers
    except RecursionError:
        raise DamagedInput(f"{path} is damaged: its extended headers nest without end.") from None


def after_global_header(file: BinaryIO, offset: int) -> int:
    """Where a pax header for the whole archive at `offset` ends, about which tarfile says nothing; or `offset`."""
    file.seek(offset)
    try:
        header = tarfile.TarInfo.frombuf(file.read(BLOCK), "utf-8", "surrogateescape")
    except tarfile.TarError:
        return offset
    return offset + BLOCK + -(-header.size // BLOCK) * BLOCK if header.type == tarfile.XGLTYPE else offset


def split_name(name: str, at_last_dot: bool = False) -> tuple[str, str]:
    """`folder/000420017.jpg` → key and suffix. What is not UTF-8 in it is written out as escapes."""
    name = name.encode("utf-8", "backslashreplace").decode().rpartition("/")[2]
    key, _, suffix = name.rpartition(".") if at_last_dot else name.partition(".")
    return key, suffix.lower()


def refuse_compressed(path: Path, file: BinaryIO) -> None:
    """Refuse a tar within another format, under either policy: nothing of it is lost.

    Raises:
        DamagedInput: it is one.
    """
    start = file.read(10)
    file.seek(0)
    for magic, name in MAGIC.items():
        if magic.match(start):
            raise DamagedInput(
                f"{path} is not a whole, uncompressed tar: it is compressed with {name}. Decompress it in its place."
            )


def damage_at_end(file: BinaryIO, offset: int) -> str:
    """What is wrong from `offset`, the last member's end, on, where there should be two blocks of zeros or more."""
    length = 0
    file.seek(offset)
    while block := file.read(1 << 20):
        if block.count(0) != len(block):
            return f"is damaged: what follows byte {offset} is neither a member nor the end of the archive"
        length += len(block)
    return "" if length >= 2 * BLOCK else "is cut short: it ends without the end-of-archive marker"
