"""Durable files: a file or folder is either absent or whole, and stored JSON knows its own hash."""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from shards.base.errors import RequestError, WorkError

NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
PIECE_BYTES = 1 << 20
AT_FDCWD, RENAME_NOREPLACE = -100, 1


class DamagedFile(WorkError):
    """A stored file is not what was written: bits flipped, bytes missing, or edited by hand."""


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make it, and those above it, so that they survive a power cut."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)


def fsync_file(path: str | Path, forget: bool = False) -> None:
    """Flush a file to the disk; and `forget` its pages in memory, where nobody will read it here soon.

    (A writer of terabytes that kept them would push everything else out of memory, the tars that it reads too; and
    the kernel needs several times as long to find a fresh page as to fill it.)
    """
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        if forget and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fsync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder`, itself included, to the disk."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync_file(os.path.join(parent, name))
        fsync_folder(Path(parent))


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, which takes its place, whole and on the disk, where the block ends well."""
    private = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    private.mkdir(parents=True)
    try:
        yield private
        fsync_tree(private)
        if target.exists():
            shutil.rmtree(target)
        private.replace(target)
        fsync_folder(target.parent)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def write_file(path: Path, data: bytes) -> Path:
    """A new file, on the disk; gone again where it cannot be written. Returns its path."""
    with _new_file(path) as file:
        file.write(data)
    return path


def copy_file(source: Path, path: Path) -> Path:
    """A copy, as `write_file` writes; of a file that need not fit into memory."""
    with source.open("rb") as whole, _new_file(path) as file:
        shutil.copyfileobj(whole, file, PIECE_BYTES)
    return path


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees the old file or the new one, whatever happens in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        write_file(temporary, data).replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def create_file(path: Path, temporary: Path) -> bool:
    """Give a file the name `path`, durably, if nothing has it; of two that do so at once, one does.

    Returns:
        Whether nothing had it. `temporary` is gone either way.

    Raises:
        RequestError: the file system can do neither `link` nor `renameat2`.
    """
    try:
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            rename_if_absent(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
        fsync_folder(path.parent)  # for a loser too, who reads what a winner may not have flushed yet
    return True


def rename_if_absent(source: Path, target: Path) -> None:
    """renameat2 with RENAME_NOREPLACE: for file systems without hard links.

    Raises:
        FileExistsError: `target` is there.
        RequestError: the file system, or the system, does not know it.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    done = function and function(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), RENAME_NOREPLACE)
    if done == 0:
        return
    number = ctypes.get_errno() if function else errno.ENOSYS
    if number in (errno.EINVAL, errno.ENOSYS, *NO_LINKS):
        raise RequestError(
            f"The file system of {target.parent} has neither hard links nor renames that replace nothing. Two jobs "
            f"could not be kept apart on it: put the root on another one, or on an object store."
        )
    raise OSError(number, os.strerror(number), str(target))


def check_version(found: Any, expected: int, where: str) -> None:
    """Check the format version of a stored record.

    Raises:
        RequestError: another version of latentmill wrote it.
    """
    if found != expected:
        raise RequestError(
            f"{where} has format version {found}, and this version of latentmill reads only {expected}. Use the one "
            f"that wrote it, or start anew."
        )


def canonical_json(value: Any) -> bytes:
    """The one byte string that stands for `value`: sorted keys, two spaces, UTF-8, a newline at the end."""
    return (json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sealed_json(value: dict[str, Any]) -> bytes:
    """`value` with a `sha256` of its own canonical bytes."""
    seal = hashlib.sha256(canonical_json(value)).hexdigest()
    return canonical_json({**value, "sha256": seal})


def write_sealed_json(path: Path, value: dict[str, Any]) -> None:
    """Write `sealed_json(value)`, atomically."""
    write_atomically(path, sealed_json(value))


def read_sealed_json(path: Path) -> dict[str, Any]:
    """Read what `write_sealed_json` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedFile: any byte of it differs from what was written.
    """
    return parse_sealed_json(path.read_bytes(), str(path))


def parse_sealed_json(data: bytes, where: str) -> dict[str, Any]:
    """The value of `sealed_json`'s bytes, without the seal; `where` they came from, for people.

    Raises:
        DamagedFile: any byte differs from what was written.
    """
    try:
        value = json.loads(data)
        seal = value.pop("sha256")
        intact = (
            hashlib.sha256(canonical_json(value)).hexdigest() == seal
            and canonical_json(value | {"sha256": seal}) == data
        )
    except (ValueError, KeyError, AttributeError):
        intact = False
    if not intact:
        raise DamagedFile(
            f"{where} is damaged: its content does not match the SHA-256 it carries. Restore it from a copy; "
            f"`python -m shards verify ROOT` names all that is damaged."
        )
    return value


def parse_json_lines(data: bytes, where: str) -> list[dict[str, Any]]:
    """The whole lines of a run's log, each an object with a `step`. A damaged one is passed over, loudly."""
    found = []
    *whole, _torn = data.decode(errors="replace").split("\n")
    for number, line in enumerate(whole, start=1):
        try:
            fields = json.loads(line)
        except ValueError:
            fields = None
        if isinstance(fields, dict) and isinstance(fields.get("step"), int):
            found.append(fields)
        else:
            print(f"{where}: line {number} is damaged and passed over", flush=True)
    return found


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """Hold an exclusive lock on the file `path`, which is created or truncated; yields the file, open for writing.

    The kernel releases the lock when the holder dies.

    Raises:
        RequestError: the file system does not support file locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        flock(file.fileno(), path)
        yield file


def flock(descriptor: int, path: Path, wait: bool = True) -> None:
    """Take an exclusive lock on an open file; `path` is its path, for the error message.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is false.
        RequestError: the file system does not support file locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise RequestError(
            f"The file system of {path.parent} does not support file locks (flock: {error.strerror}), which are needed "
            f"to tell the files of running processes from those of dead ones: mount it with flock support (Lustre: "
            f"`-o flock` or `-o localflock`), or choose a folder on a different file system."
        ) from error
