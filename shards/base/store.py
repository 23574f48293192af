"""Where a latents root lies: a folder, or an address on an object store (s3://, gs://, az://, whatever fsspec opens).

Both have one layout and one commit protocol (`shards/root/commit.py`). A `Store` is the little that the protocol needs,
and differs in how a file comes to be there whole, and in how two writers keep out of each other's way:

                     a file or part appears by     writers exclude each other by
    LocalStore       fsync, then a rename          flock; the kernel frees a dead holder's
    RemoteStore      a put, atomic per object      a numbered claim (`remote.py`); a silent holder's runs out

So a part on an object store may be there in pieces for a while, as one that was renamed into place may be there without
its receipt: nobody looks before the receipt says so.
"""

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from shards.base.durable import fsync_file, fsync_folder, fsync_tree, locked, remove_torn, sha256_file, write_atomically

StillHeld = Callable[[], None]
"""Raises WorkError where the lock was lost meanwhile."""


class Store(ABC):
    """A latents root. Names are relative to it, with forward slashes: `commits/00042.json`."""

    @abstractmethod
    def where(self, name: str = "") -> str:
        """The full path or address of `name`, for people."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A file's bytes.

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
    def files(self, folder: str = "") -> list[str]:
        """Every file below `folder`, by name relative to it, sorted; none where there is no such folder."""

    @abstractmethod
    def entries(self) -> list[str]:
        """Names directly in the root, files and folders."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a small file so that a reader sees the old one or the new one, whatever happens in between."""

    @abstractmethod
    def put(self, source: Path, name: str) -> None:
        """A local file or folder => `name`, durable once this returns; what was there is in the way, and goes.

        `source` may be gone afterwards.
        """

    @abstractmethod
    def locked(self, name: str) -> AbstractContextManager[StillHeld]:
        """Keep other writers out of what `name` stands for, on this machine and on others."""

    @abstractmethod
    def local(self, folder: str, names: Sequence[str] | None = None) -> AbstractContextManager[Path]:
        """A folder as a local one for reading: itself, or a copy (of the files `names`) that is gone afterwards."""

    @abstractmethod
    def attempts(self, scratch: Path | None) -> Path:
        """The local folder under which attempts are made; `scratch` is where the root itself is not local."""


class LocalStore(Store):
    """A folder, on this machine's disk or on one that all machines mount."""

    def __init__(self, root: Path):
        self.root = root

    def where(self, name: str = "") -> str:
        return str(self.root / name)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def get(self, name: str, target: Path) -> None:
        shutil.copyfile(self.root / name, target)

    def size(self, name: str) -> int | None:
        path = self.root / name
        return path.stat().st_size if path.is_file() else None

    def sha256(self, name: str) -> str:
        return sha256_file(self.root / name)

    def files(self, folder: str = "") -> list[str]:
        top = self.root / folder
        return sorted(path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file())

    def entries(self) -> list[str]:
        return sorted(os.listdir(self.root)) if self.root.exists() else []

    def write(self, name: str, data: bytes) -> None:
        remove_torn(self.root / name)  # whoever writes holds the lock
        write_atomically(self.root / name, data)

    def put(self, source: Path, name: str) -> None:
        target = self.root / name
        fsync_tree(source) if source.is_dir() else fsync_file(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            shutil.rmtree(target)
        source.replace(target)
        fsync_folder(target.parent)

    @contextmanager
    def locked(self, name: str) -> Iterator[StillHeld]:
        with locked(self.root / ".locks" / f"{name}.lock"):
            yield lambda: None  # until the file is closed

    @contextmanager
    def local(self, folder: str, names: Sequence[str] | None = None) -> Iterator[Path]:
        yield self.root / folder

    def attempts(self, scratch: Path | None) -> Path:
        return self.root / ".attempts"  # one file system: what is done there is renamed into place


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
