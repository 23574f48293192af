"""Stores for latents roots: local folders, and object stores at any URL that fsspec can open (s3://, gs://, az://, …).

Both kinds share one layout and one commit protocol (`shards/root/commit.py`), and `Store` has only the operations that
the protocol needs. Writers never lock each other out; conflicts are resolved as follows:

                     create: one writer wins       move: a whole folder, atomically
    LocalStore       link, or renameat2            rename
    RemoteStore      If-None-Match or similar      not supported: files are uploaded one by one

A part on an object store may therefore be incomplete for a while, just as a part on a disk may exist before its
receipt. Readers are unaffected, since they only look at parts that have a receipt.
"""

import errno
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, PlainSerializer, PlainValidator

from shards.base.durable import (
    copy_file,
    create_file,
    fsync_folder,
    fsync_tree,
    make_folder,
    raise_unless_missing,
    sha256_file,
    write_file,
)
from shards.base.errors import RequestError, naming
from shards.base.pool import in_background

STAGING_FOLDER = ".unfinished"
"""Folder in the root where files are written before they are linked or renamed into place."""

READ_AHEAD = 512
"""Number of files that `read_each` fetches per request."""


class Entry(NamedTuple):
    """Metadata of a file in a listing."""

    bytes: int
    etag: str
    """Opaque tag that changes with the content."""
    modified: float
    """Modification time in seconds since the epoch, by the store's clock."""


class Store(ABC):
    """Storage for a latents root. Names are relative to the root and use forward slashes:
    `commits/256x256/00042.json`."""

    @abstractmethod
    def where(self, name: str = "") -> str:
        """Return the full path or URL of `name`, for messages."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read a whole file. Raises FileNotFoundError if it does not exist."""

    @abstractmethod
    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Read the bytes [start, end) of a file, or fewer if the file is shorter. Raises FileNotFoundError if it does
        not exist."""

    def read_many(self, names: list[str]) -> dict[str, bytes]:
        """Read many small files at once. Missing files are left out of the result."""
        found = {}
        for name in names:
            try:
                found[name] = self.read(name)
            except FileNotFoundError:
                continue
        return found

    @abstractmethod
    def get(self, name: str, target: Path) -> None:
        """Copy a file to a local path. Raises FileNotFoundError if it does not exist."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, or None if it does not exist."""

    @abstractmethod
    def sha256(self, name: str) -> str:
        """Return the SHA-256 of a file as hex, reading it in blocks."""

    @abstractmethod
    def listing(self, folder: str = "") -> dict[str, Entry]:
        """List all files below `folder`, keyed by their names relative to it. A missing folder has an empty listing."""

    def files(self, folder: str = "") -> list[str]:
        """List the names of all files below `folder`, relative to it, in sorted order."""
        return sorted(self.listing(folder))

    @abstractmethod
    def entries(self) -> list[str]:
        """List the names of the files and folders directly in the root."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a small file atomically: readers see either the old content or the new content."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Create a small file durably if it does not exist, and return whether this call created it.

        At most one of several concurrent callers gets True. If the reply to the winning request was lost and the
        request was retried, even the winner gets False.
        """

    @abstractmethod
    def move(self, source: Path, folder: str) -> bool:
        """Move a local folder to `folder`, atomically and durably. Return False if `folder` exists or the store
        cannot move folders."""

    @abstractmethod
    def put(self, files: Mapping[str, Path]) -> None:
        """Copy local files to the given names, replacing existing files. All copies are durable on return."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove files, ignoring missing ones, and any folders left empty."""

    def abort_uploads(self, before: float) -> list[str]:
        """Abort multipart uploads started before `before` (seconds since the epoch), and return their names.

        Unfinished uploads take up space without appearing in listings. Only S3 keeps them indefinitely.
        """
        return []

    @abstractmethod
    def local(self, folder: str) -> AbstractContextManager[Path]:
        """Provide a local folder with the files of `folder`: the folder itself, or a temporary copy if the store is
        remote."""

    @abstractmethod
    def attempts(self) -> Path:
        """Return the local folder in which attempts create their private folders. For a remote root, it is inside a
        folder of this user in the system's temporary folder."""


def read_each(store: Store, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the names and bytes of small files, in the order of `names`. Missing files are skipped.

    At most two batches are in memory: the one that the caller is working on, and the next one, which is being fetched.
    """
    batches = (list(names[first : first + READ_AHEAD]) for first in range(0, len(names), READ_AHEAD))
    with closing(in_background(((batch, store.read_many(batch)) for batch in batches), ahead=0)) as fetched:
        for batch, found in fetched:
            for name in batch:
                if (data := found.pop(name, None)) is not None:
                    yield name, data


class LocalStore(Store):
    """Store in a folder on a local disk, or on a file system shared by all machines."""

    def __init__(self, root: Path):
        self.root = root

    def where(self, name: str = "") -> str:
        return str(self.root / name)

    def read(self, name: str) -> bytes:
        with naming(self.root / name):
            return (self.root / name).read_bytes()

    def read_range(self, name: str, start: int, end: int) -> bytes:
        with naming(self.root / name), open(self.root / name, "rb", buffering=0) as file:
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
        for parent, _, names in os.walk(top, onerror=raise_unless_missing, followlinks=True):
            for name in names:
                path = Path(parent, name)
                try:
                    stat = path.stat()
                except FileNotFoundError as error:
                    raise_unless_missing(error)
                    continue  # removed after it was listed
                etag = f"{stat.st_size}-{stat.st_mtime_ns}"
                found[path.relative_to(top).as_posix()] = Entry(stat.st_size, etag, stat.st_mtime)
        return found

    def entries(self) -> list[str]:
        return sorted(os.listdir(self.root)) if self.root.exists() else []

    def write(self, name: str, data: bytes) -> None:
        write_file(self._staging_path(), data).replace(self._prepare_path(name))
        fsync_folder(self._prepare_path(name).parent)

    def create(self, name: str, data: bytes) -> bool:
        return create_file(self._prepare_path(name), write_file(self._staging_path(), data))

    def move(self, source: Path, folder: str) -> bool:
        fsync_tree(source)
        target = self._prepare_path(folder)
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
            copy_file(path, self._staging_path()).replace(self._prepare_path(name))
            fsync_folder(self._prepare_path(name).parent)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self.root / name).unlink(missing_ok=True)
        # keep the staging folder, since another process may be about to write into it
        folders = {Path(name).parent for name in names} - {Path(STAGING_FOLDER)}
        for folder in sorted(folders, reverse=True):  # subfolders come before their parents
            _remove_if_empty(self.root / folder)

    @contextmanager
    def local(self, folder: str) -> Iterator[Path]:
        yield self.root / folder

    def attempts(self) -> Path:
        return self.root / ".attempts"  # on the root's file system, so that a finished part can be renamed into place

    def _staging_path(self) -> Path:
        return self._prepare_path(f"{STAGING_FOLDER}/{uuid.uuid4().hex}")

    def _prepare_path(self, name: str) -> Path:
        path = self.root / name
        make_folder(path.parent)
        return path


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder unless it contains anything, or is a link to a folder. Other processes may remove it or write
    into it at the same time."""
    if folder.is_symlink():
        return
    try:
        if not any(folder.iterdir()):  # rmdir may refuse a folder with files for other reasons, such as permissions
            folder.rmdir()
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST}:
            raise


def parse_place(value: Any) -> Path | str:
    """Parse the path or URL of a latents root. `file://` URLs become paths, and `~/` becomes the home directory."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not text:
        raise ValueError("the location must be a folder, or a URL such as s3://bucket/latents")
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    if "://" in text:
        return text.rstrip("/")
    return Path(text).expanduser() if text == "~" or text.startswith("~/") else Path(text)


def parse_local(value: Any) -> Path:
    """Parse a path that must be on a local disk, as `parse_place` does. Raises RequestError if it is empty or a URL,
    which `Path` would turn into a relative path such as s3:/bucket/tars."""
    if value == "":
        raise RequestError("The path is empty, perhaps because a shell variable is not set. Give a local path.")
    place = parse_place(value)
    if isinstance(place, str):
        raise RequestError(f"{value} is a URL, but only a local path is possible here. Give a local path.")
    return place


def absolute_place(place: Path | str) -> Path | str:
    """Make a path absolute, because workers have different working directories. A URL is returned as it is."""
    return place.absolute() if isinstance(place, Path) else place


def resolved_place(place: Path | str) -> str:
    """Return an absolute path without symbolic links, or a URL, to compare places."""
    parsed = parse_place(place)
    return str(parsed.resolve()) if isinstance(parsed, Path) else parsed


Place = Annotated[Path | str, PlainValidator(parse_place), PlainSerializer(str, when_used="json")]
"""Config field type for a latents root: a `Path` for a local root, otherwise the URL as a `str`. `shards/open.py` opens
it."""

LocalPath = Annotated[Path, BeforeValidator(parse_local)]
"""Config field type for a path on a local disk, for which a URL is refused."""
