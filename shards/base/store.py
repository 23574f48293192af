"""Where a latents root lies: a folder, or an address on an object store (s3://, gs://, az://, whatever fsspec opens).

Both have one layout and one commit protocol (`shards/root/commit.py`). A `Store` is the little that the protocol needs.
Writers never exclude each other; each way of writing says what becomes of two that meet:

                     create: one of two wins       move: a folder, whole or not at all
    LocalStore       link, or renameat2            rename
    RemoteStore      If-None-Match, and its like   there is none: files are put one by one

So a part on an object store may be there in pieces for a while, as one that was renamed into place may be there without
its receipt: nobody looks before the receipt says so.
"""

import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import PlainSerializer, PlainValidator

from shards.base.durable import copy_file, create_file, fsync_folder, fsync_tree, make_folder, sha256_file, write_file

UNFINISHED = ".unfinished"
"""Folder of the root in which files are written that are then linked or renamed to where they belong."""

READ_AHEAD = 512
"""Files per request of `read_each`."""


class Entry(NamedTuple):
    """What a listing says of a file."""

    bytes: int
    etag: str
    """Changes with the content."""
    modified: float
    """Seconds since the epoch, by the store's own clock."""


class Store(ABC):
    """A latents root. Names are relative to it, with forward slashes: `commits/256x256/00042.json`."""

    @abstractmethod
    def where(self, name: str = "") -> str:
        """The full path or address of `name`, for people."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A file's bytes.

        Raises:
            FileNotFoundError: there is no such file.
        """

    @abstractmethod
    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Read the bytes [start, end) of a file; fewer if the file ends before `end`.

        Raises:
            FileNotFoundError: there is no such file.
        """

    def read_many(self, names: list[str]) -> dict[str, bytes]:
        """Many small files at once, by name; those that are not there are left out."""
        found = {}
        for name in names:
            try:
                found[name] = self.read(name)
            except FileNotFoundError:
                continue
        return found

    @abstractmethod
    def get(self, name: str, target: Path) -> None:
        """Copy a file to a local path.

        Raises:
            FileNotFoundError: there is no such file.
        """

    @abstractmethod
    def size(self, name: str) -> int | None:
        """A file's size in bytes; None where there is none."""

    @abstractmethod
    def sha256(self, name: str) -> str:
        """SHA-256 of a file, as hex, read in blocks."""

    @abstractmethod
    def listing(self, folder: str = "") -> dict[str, Entry]:
        """Every file below `folder`, by name relative to it; none where there is no such folder."""

    def files(self, folder: str = "") -> list[str]:
        """Their names, sorted."""
        return sorted(self.listing(folder))

    def etags(self, folder: str) -> dict[str, str]:
        """Their names relative to the root → etag."""
        return {f"{folder}/{name}": entry.etag for name, entry in self.listing(folder).items()}

    @abstractmethod
    def entries(self) -> list[str]:
        """Names directly in the root, files and folders."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a small file so that a reader sees the old one or the new one, whatever happens in between."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Write a small file, durably, if there is none; returns whether there was none.

        Of any number that do so at once one is told True, or none: where the reply was lost, and the request made
        again, the winner too is told False.
        """

    @abstractmethod
    def move(self, source: Path, folder: str) -> bool:
        """A local folder => `folder`, durable and whole or not at all; False where that cannot be, or one is there."""

    @abstractmethod
    def put(self, files: Mapping[str, Path]) -> None:
        """Name → local file: each is there once this returns, durably, instead of what was there."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove files, as far as they are there, and folders that are empty then."""

    def abort_uploads(self, before: float) -> list[str]:
        """Give up uploads in pieces that began before (seconds since the epoch) and never ended; returns their names.

        They take room, and no listing shows them. Only S3 keeps them for ever.
        """
        return []

    @abstractmethod
    def local(self, folder: str) -> AbstractContextManager[Path]:
        """A folder as a local one for reading: itself, or a copy that is gone afterwards."""

    @abstractmethod
    def attempts(self) -> Path:
        """The local folder under which attempts are made: in the temporary folder where the root is not local."""


def read_each(store: Store, names: Sequence[str], at_once: int = READ_AHEAD) -> Iterator[tuple[str, bytes]]:
    """Yield the names and bytes of any number of small files, in the order of `names`; missing files are left out.

    At most `at_once` files are in memory, and as many again that are fetched while the caller works on these.
    """
    batches = (list(names[first : first + at_once]) for first in range(0, len(names), at_once))
    with ThreadPoolExecutor(1, "read_each") as reader:

        def fetch() -> tuple[list[str], Future[dict[str, bytes]]] | None:
            batch = next(batches, None)
            return (batch, reader.submit(store.read_many, batch)) if batch else None

        coming = fetch()
        while coming:
            batch, found = coming[0], coming[1].result()
            coming = fetch()
            for name in batch:
                if (data := found.pop(name, None)) is not None:
                    yield name, data


class LocalStore(Store):
    """A folder, on this machine's disk or on one that all machines mount."""

    def __init__(self, root: Path):
        self.root = root

    def where(self, name: str = "") -> str:
        return str(self.root / name)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def read_range(self, name: str, start: int, end: int) -> bytes:
        with open(self.root / name, "rb", buffering=0) as file:
            return os.pread(file.fileno(), end - start, start)

    def get(self, name: str, target: Path) -> None:
        shutil.copyfile(self.root / name, target)

    def size(self, name: str) -> int | None:
        path = self.root / name
        return path.stat().st_size if path.is_file() else None

    def sha256(self, name: str) -> str:
        return sha256_file(self.root / name)

    def listing(self, folder: str = "") -> dict[str, Entry]:
        top, found = self.root / folder, {}
        for parent, _, names in os.walk(top):
            for name in names:
                path = Path(parent, name)
                try:
                    stat = path.stat()
                except FileNotFoundError:
                    continue  # it went meanwhile
                etag = f"{stat.st_size}-{stat.st_mtime_ns}"
                found[path.relative_to(top).as_posix()] = Entry(stat.st_size, etag, stat.st_mtime)
        return found

    def entries(self) -> list[str]:
        return sorted(os.listdir(self.root)) if self.root.exists() else []

    def write(self, name: str, data: bytes) -> None:
        write_file(self._unfinished(), data).replace(self._place(name))
        fsync_folder(self._place(name).parent)

    def create(self, name: str, data: bytes) -> bool:
        return create_file(self._place(name), write_file(self._unfinished(), data))

    def move(self, source: Path, folder: str) -> bool:
        fsync_tree(source)
        target = self._place(folder)
        try:
            source.rename(target)
        except OSError:
            if target.exists():
                return False
            raise
        finally:
            fsync_folder(target.parent)
        return True

    def put(self, files: Mapping[str, Path]) -> None:
        for name, path in files.items():
            copy_file(path, self._unfinished()).replace(self._place(name))
            fsync_folder(self._place(name).parent)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self.root / name).unlink(missing_ok=True)
        # another process may be about to write into the folder of what is unfinished
        for folder in {Path(name).parent for name in names} - {Path(UNFINISHED)}:
            if (self.root / folder).is_dir() and not any((self.root / folder).iterdir()):
                (self.root / folder).rmdir()

    @contextmanager
    def local(self, folder: str) -> Iterator[Path]:
        yield self.root / folder

    def attempts(self) -> Path:
        return self.root / ".attempts"  # one file system: what is done there is renamed into place

    def _unfinished(self) -> Path:
        return self._place(f"{UNFINISHED}/{uuid.uuid4().hex}")

    def _place(self, name: str) -> Path:
        path = self.root / name
        make_folder(path.parent)
        return path


def parse_place(value: Any) -> Path | str:
    """A latents root as people write it: a path, or an address with `://`. `file://` is a path."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not text:
        raise ValueError("give a folder, or an address such as s3://bucket/latents")
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return text.rstrip("/") if "://" in text else Path(text)


Place = Annotated[Path | str, PlainValidator(parse_place), PlainSerializer(str, when_used="json")]
"""A config field for a latents root: a `Path` where it is local, the address as `str` where it is not; `shards/open.py`
opens it."""
