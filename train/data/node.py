"""Work that one process per machine does for the others: parsing an index, applying a filter, checking file sizes.

    FOLDER/KEY/names.npy, …     written by the first process that takes the lock, and memory-mapped by all processes
    FOLDER/KEY.lock             the lock

FOLDER is inside `data.cache` if that is set, and otherwise inside the system's temporary folder. A key determines the
content of its entry exactly, so an entry never needs to be updated. Entries that have not been used for a week are
removed; processes that have already mapped an entry can still read it.
"""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from shards.base.durable import fsync_tree, locked
from shards.base.scratch import user_folder
from shards.base.store import LocalStore, Store
from shards.format.mds import MdsIndex
from train.data.cache import INDEXES

KEPT_SECONDS = 7 * 24 * 3600.0
"""Time in seconds after which an unused entry is removed."""
NUM_STAT_THREADS = 32
FILES_AT_ONCE = 1000


def node_folder(cache: Path | None) -> Path:
    """Return the folder in which the processes of this machine share tables.

    Raises:
        RequestError: the default folder, inside the system's temporary folder, belongs to another user.
    """
    if cache is not None:
        return cache / INDEXES
    user_folder().mkdir(mode=0o700, exist_ok=True)
    return user_folder() / INDEXES  # checked again, now that it exists


def once_per_node(folder: Path, key: str, make: Callable[[Path], None]) -> Path:
    """Return FOLDER/KEY. If it does not exist yet, one process calls `make` to fill it while the others wait."""
    target = folder / key
    with locked(folder / f"{key}.lock"):
        with suppress(FileNotFoundError):
            os.utime(target)  # so that `_sweep` does not consider it unused
            return target
        _sweep(folder, key)
        making = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=folder))
        try:
            make(making)
            fsync_tree(making)
            return making.rename(target)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise


def _sweep(folder: Path, key: str) -> None:
    """Remove unused entries, and leftovers from a process that was killed while making `key`.

    The caller must hold the lock for `key`.
    """
    for path in folder.iterdir():
        try:
            is_old = time.time() - path.stat().st_mtime > KEPT_SECONDS
        except FileNotFoundError:  # another process has removed or renamed it
            continue
        if path.is_dir() and (is_old or path.name.startswith(f"{key}.")):
            shutil.rmtree(path, ignore_errors=True)


class SizeCheck:
    """Background check that the sizes of local files match their indexes."""

    def __init__(self, streams: Sequence[tuple[Store, str, MdsIndex]]):
        self.problem: str | None = None
        """Error message about a file that is missing or has the wrong size; None: no such file has been found yet."""
        self.streams = streams
        self.thread = threading.Thread(target=self._check, daemon=True, name="size-check")
        self.thread.start()

    def wait(self, seconds: float) -> None:
        """Wait for at most `seconds` until all files have been checked."""
        self.thread.join(seconds)

    def _check(self) -> None:
        for store, bucket, files in self.streams:
            self.problem = self.problem or check_sizes(store, bucket, files)


def check_sizes(store: Store, bucket: str, files: MdsIndex) -> str | None:
    """Return an error message about a local file that is missing or has the wrong size, or None if there is none.

    Many files are checked concurrently. Files in a remote store are not checked here, but when they are downloaded.
    """
    if not isinstance(store, LocalStore):
        return None
    top, blocks, problems = store.where(bucket), iter(range(0, len(files), FILES_AT_ONCE)), list[str]()

    def check() -> None:
        for first in blocks:
            problems.extend(islice(_wrong_sizes(top, files, range(first, min(first + FILES_AT_ONCE, len(files)))), 1))
            if problems:
                return

    # daemon threads, so that this process can exit while storage is unresponsive
    threads = [threading.Thread(target=check, daemon=True) for _ in range(NUM_STAT_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems[0] if problems else None


def _wrong_sizes(top: str, files: MdsIndex, numbers: Iterable[int]) -> Iterator[str]:
    """Yield an error message for each file in `numbers` that is missing, unreadable or of the wrong size."""
    for index in numbers:
        path = os.path.join(top, files.name(index))
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            size = -1
        except OSError as error:
            yield f"The size of {path} cannot be read: {error}. Restore access to the storage."
            continue
        if size != files.sizes[index]:
            found = "is missing, but" if size < 0 else f"is {size} bytes long, but"
            yield f"{path} {found} its index lists {files.sizes[index]} bytes. Restore the file from a backup."
