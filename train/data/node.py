"""What the processes of a machine need not each do for themselves: parse an index, apply a filter, look at files.

    FOLDER/KEY/names.npy, …     made by the process that gets the lock first; mapped into memory by all
    FOLDER/KEY.lock

FOLDER is `data.cache`'s, or one of this user's in the temporary folder. A key says what it holds down to the last bit,
so nothing is ever made twice, or anew. What was not used for a while goes; who has mapped it keeps it.
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
from shards.base.errors import RequestError
from shards.base.store import LocalStore, Store
from shards.format.mds import MdsIndex
from train.data.cache import INDEXES

KEPT_SECONDS = 7 * 24 * 3600.0
"""How long what nobody uses stays."""
NUM_STAT_THREADS = 32
FILES_AT_ONCE = 1000


def node_folder(cache: Path | None) -> Path:
    """Where this machine's processes share tables.

    Raises:
        RequestError: the folder in the temporary one is another user's.
    """
    if cache is not None:
        return cache / INDEXES
    folder = Path(tempfile.gettempdir()) / f"latentmill-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RequestError(f"{folder} belongs to another user. Set TMPDIR, or data.cache, to a folder of your own.")
    return folder / INDEXES


def once_per_node(folder: Path, key: str, make: Callable[[Path], None]) -> Path:
    """FOLDER/KEY, which `make` fills if no process of this machine has done so; the others wait for it."""
    target = folder / key
    with locked(folder / f"{key}.lock"):
        with suppress(FileNotFoundError):
            os.utime(target)  # who sweeps from now on finds it in use
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
    """Remove what a killed process left of `key`, whose lock is held, and what was not used for long."""
    for place in folder.iterdir():
        try:
            old = time.time() - place.stat().st_mtime > KEPT_SECONDS
        except FileNotFoundError:  # others make and sweep at this moment
            continue
        if place.is_dir() and (old or place.name.startswith(f"{key}.")):
            shutil.rmtree(place, ignore_errors=True)


class Look:
    """Holds the sizes of local files against their indexes, by threads of its own, and goes on as long as it takes."""

    def __init__(self, streams: Sequence[tuple[Store, str, MdsIndex]]):
        self.problem: str | None = None
        """The first file that was found to be missing or of another size."""
        self.streams = streams
        self.thread = threading.Thread(target=self._look, daemon=True, name="look")
        self.thread.start()

    def wait(self, seconds: float) -> None:
        """Until all was looked at, or `seconds` are over."""
        self.thread.join(seconds)

    def _look(self) -> None:
        for store, bucket, files in self.streams:
            self.problem = self.problem or check_sizes(store, bucket, files)


def check_sizes(store: Store, bucket: str, files: MdsIndex) -> str | None:
    """The first local file that is missing or has another size than the index says, many looked at at once.

    Remote ones are checked when they come.
    """
    if not isinstance(store, LocalStore):
        return None
    top, blocks, problems = store.where(bucket), iter(range(0, len(files), FILES_AT_ONCE)), list[str]()

    def look() -> None:
        for first in blocks:
            problems.extend(islice(_wrong_sizes(top, files, range(first, min(first + FILES_AT_ONCE, len(files)))), 1))
            if problems:
                return

    # daemons: the exit of this process does not wait for storage that does not answer
    threads = [threading.Thread(target=look, daemon=True) for _ in range(NUM_STAT_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems[0] if problems else None


def _wrong_sizes(top: str, files: MdsIndex, numbers: Iterable[int]) -> Iterator[str]:
    for index in numbers:
        path = os.path.join(top, files.name(index))
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            size = -1
        except OSError as error:
            yield f"{path} cannot be looked at: {error}."
            continue
        if size != files.sizes[index]:
            found = "no file" if size < 0 else f"{size} bytes"
            yield f"{path}: {found}, but the index says {files.sizes[index]} bytes. Restore the file from its copy."
