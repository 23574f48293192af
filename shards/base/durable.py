"""Durable files: atomic writes that survive a power cut, file locks, and JSON sealed with its own hash."""

import ctypes
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from shards.base.errors import RequestError, WorkError, is_storage_error, naming

NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
COPY_CHUNK_BYTES = 1 << 20
AT_FDCWD, RENAME_NOREPLACE = -100, 1


class DamagedFile(WorkError):
    """A stored file that differs from what was written: corrupted, truncated or edited by hand."""


def sha256_file(path: Path) -> str:
    with naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that renames and new names survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, flushing each new entry to disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)


def fsync_file(path: str | Path, forget: bool = False) -> None:
    """Flush a file to disk and, with `forget`, drop its pages from the page cache.

    Without `forget`, a job that writes terabytes evicts everything else from the cache, including the tars it reads,
    and the kernel takes several times as long to find a free page as to fill it.
    """
    with naming(path), open(path, "rb") as file:
        os.fsync(file.fileno())
        if forget and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def raise_unless_missing(error: OSError) -> None:
    """Re-raise a read error, unless the folder or file no longer exists.

    Raises:
        RequestError: it is a link whose target does not exist, perhaps because a disk is not mounted.
        OSError: `error`, unless the folder or file was removed.
    """
    if error.errno == errno.ESTALE:  # may also mean that another machine has just removed the folder
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(error.filename)
            raise error
    elif not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
    elif os.path.islink(error.filename):
        raise RequestError(
            f"{error.filename} is a link to {os.readlink(error.filename)}, which does not exist. If it is on another "
            f"disk, mount that disk; otherwise remove the link."
        ) from None


def fsync_tree(folder: Path) -> None:
    """Flush `folder` and everything below it to disk."""
    for parent, _, names in os.walk(folder, topdown=False, onerror=raise_unless_missing):
        for name in names:
            fsync_file(os.path.join(parent, name))
        fsync_folder(Path(parent))


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder. If the block succeeds, flush the folder to disk and replace `target` with it.

    If `target` is a link, the folder that it names is replaced. `target` is never incomplete. It is absent only between
    two renames: a process killed there leaves the old folder under a hidden name that ends with `.old`.
    """
    target = target.resolve()
    private = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    old = private.with_name(f"{private.name}.old")
    private.mkdir(parents=True)
    try:
        yield private
        fsync_tree(private)
        if target.exists():
            target.replace(old)
        private.replace(target)
        fsync_folder(target.parent)
    finally:
        if old.exists() and not target.exists():  # interrupted between the two renames
            old.replace(target)
        for folder in (private, old):
            shutil.rmtree(folder, ignore_errors=True)


def write_file(path: Path, data: bytes) -> Path:
    """Write a new file, flush it to disk, and return its path. If it cannot be written completely, it is removed."""
    with new_file(path) as file:
        file.write(data)
    return path


def copy_file(source: Path, path: Path) -> Path:
    """Copy a file in chunks, with the same guarantees as `write_file`."""
    with source.open("rb") as original, new_file(path) as file:
        file.writelines(_chunks(original))
    return path


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with naming(file.name):  # otherwise `new_file` would name the copy
        while data := file.read(COPY_CHUNK_BYTES):
            yield data


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing, with the same guarantees as `write_file` once the block ends."""
    try:
        with naming(path), path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically: readers see either the old file or the new one, even after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        write_file(temporary, data).replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def write_output(path: Path, data: bytes) -> None:
    """Write a file that the user named, atomically. Raises RequestError if `path` is a folder, or is in a folder that
    cannot be created or written to."""
    with output_errors(f"{path} cannot be written", "Choose the path of a file in a folder that you can write to."):
        if path.is_char_device() or path.is_fifo():  # otherwise, root would replace /dev/null with a file
            path.write_bytes(data)
        else:
            write_atomically(path, data)


@contextmanager
def output_errors(problem: str, advice: str) -> Iterator[None]:
    """Convert a write error at a path that the user chose into a RequestError with `problem`, the cause and `advice`,
    unless the disk is full or broken."""
    try:
        yield
    except OSError as error:
        if is_storage_error(error):
            raise
        raise RequestError(f"{problem} ({error.filename2 or error.filename}: {error.strerror}). {advice}") from None


def create_file(path: Path, temporary: Path) -> bool:
    """Move `temporary` to `path` durably if `path` does not exist, and return whether this call created `path`. Only
    one of several concurrent callers succeeds; `temporary` is removed in either case. Raises RequestError if the file
    system supports neither hard links nor `renameat2`."""
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
        # also flush after losing a race: the caller will read a file that the winner may not have flushed yet
        fsync_folder(path.parent)
    return True


def rename_if_absent(source: Path, target: Path) -> None:
    """Rename without replacing (`renameat2` with RENAME_NOREPLACE), for file systems that lack hard links. Raises
    FileExistsError if `target` exists, and RequestError if the kernel or the file system does not support the call."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    done = function and function(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), RENAME_NOREPLACE)
    if done == 0:
        return
    number = ctypes.get_errno() if function else errno.ENOSYS
    if number in (errno.EINVAL, errno.ENOSYS, *NO_LINKS):
        raise RequestError(
            f"The file system of {target.parent} supports neither hard links nor RENAME_NOREPLACE, so concurrent "
            f"jobs could overwrite each other. Use a folder on a different file system, or an object store."
        )
    raise OSError(number, os.strerror(number), str(target))


def check_version(found: Any, expected: int, where: str) -> None:
    """Raise RequestError if a stored record has a different format version than this version of latentmill reads."""
    if found != expected:
        raise RequestError(
            f"{where} has format version {found}, but this version of latentmill reads only version {expected}. Use "
            f"the version of latentmill that wrote the file, or start over in a new folder."
        )


def canonical_json(value: Any) -> bytes:
    """Serialise `value` to its canonical bytes: sorted keys, two-space indent, UTF-8, trailing newline."""
    return (json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object, such as a model's config.json. Raises RequestError if the file cannot be read or holds
    anything else, and OSError if the storage fails."""
    try:
        value = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        if is_storage_error(error):
            raise
        raise RequestError(
            f"{path} cannot be read as JSON: {error}. Check the path, or use an intact copy of the model."
        ) from error
    if not isinstance(value, dict):
        raise RequestError(f"{path} is not a JSON object. Use the config.json of a model.")
    return value


def sealed_json(value: dict[str, Any]) -> bytes:
    """Serialise `value` with an added `sha256` field, the hash of its canonical bytes."""
    seal = hashlib.sha256(canonical_json(value)).hexdigest()
    return canonical_json({**value, "sha256": seal})


def write_sealed_json(path: Path, value: dict[str, Any]) -> None:
    """Write `sealed_json(value)` atomically."""
    write_atomically(path, sealed_json(value))


def read_sealed_json(path: Path) -> dict[str, Any]:
    """Read a file written by `write_sealed_json`. Raises FileNotFoundError if it does not exist, and DamagedFile if its
    bytes have changed."""
    return parse_sealed_json(path.read_bytes(), str(path))


def parse_sealed_json(data: bytes, where: str) -> dict[str, Any]:
    """Verify the bytes of a sealed JSON file and return its value without the `sha256` field. Raises DamagedFile, with
    the path or URL `where` in its message, if the bytes differ from what was written."""
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
            f"{where} is damaged: its content does not match the SHA-256 stored in it. Restore it from a "
            f"backup. If it belongs to a latents root, `python -m shards verify ROOT` lists all damaged files."
        )
    return value


def parse_json_lines(data: bytes, where: str) -> list[dict[str, Any]]:
    """Parse the content of a run's log. See `iter_json_lines`."""
    return list(iter_json_lines(io.BytesIO(data), where))


def iter_json_lines(lines: Iterable[bytes], where: str) -> Iterator[dict[str, Any]]:
    """Parse the complete lines of a run's log, each a JSON object with an integer `step`. A damaged line is skipped
    with a warning on stdout, and a partial last line, which a killed writer leaves behind, is ignored.

    Args:
        lines: the lines with their newlines, such as a file opened in binary mode.
        where: path or URL of the log, for messages.
    """
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            fields = json.loads(line.decode(errors="replace"))
        except ValueError:
            fields = None
        if isinstance(fields, dict) and isinstance(fields.get("step"), int):
            yield fields
        else:
            print(f"{where}: line {number} is damaged; skipping it", flush=True)


@contextmanager
def locked(path: Path, waiting: str = "") -> Iterator[BinaryIO]:
    """Create or truncate the file `path`, and yield it, open for writing and exclusively locked. The kernel releases
    the lock if this process dies.

    Args:
        waiting: line to print if another process holds the lock; empty: nothing is printed.

    Raises:
        RequestError: the file system does not support locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        try:
            flock(file.fileno(), path, wait=False)
        except BlockingIOError:
            if waiting:
                print(waiting, flush=True)
            flock(file.fileno(), path)
        yield file


@contextmanager
def one_writer(output: Path) -> Iterator[None]:
    """Create the folder `output`, and keep other commands from writing to it inside the block. If another command
    writes to it, print a line and wait.

    Raises:
        RequestError: the folder cannot be created, or its file system does not support locks.
    """
    with output_errors(f"The output folder {output} cannot be created", "Choose a writable --output."):
        output.mkdir(parents=True, exist_ok=True)
    with locked(output / ".lock", f"Waiting for another command that writes to {output} …"):
        yield


def flock(descriptor: int, path: Path, wait: bool = True) -> None:
    """Take an exclusive lock on an open file. Error messages refer to the file as `path`. Raises BlockingIOError if
    another process holds it and `wait` is false, and RequestError if the file system does not support file locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise RequestError(
            f"The file system of {path.parent} does not support file locks (flock: {error.strerror}), which are needed "
            f"to distinguish the files of running processes from those of dead ones. Mount it with flock support "
            f"(Lustre: `-o flock` or `-o localflock`), or choose a folder on a different file "
            f"system (for temporary files, with TMPDIR)."
        ) from error
