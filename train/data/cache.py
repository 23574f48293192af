"""A size-limited local cache of remote MDS files, shared by all processes on a machine.

    CACHE/cache.sqlite                            names and sizes of the copies, and when each was last used
    CACHE/<root>/256x256/<hash>/00042.3fa9c1d2/shard.00000.mds

A copy is renamed into place after its size and hash have been verified. The least recently used copies are evicted.
Only files listed in cache.sqlite are ever removed, and the folder must have been created by this module, so an original
file cannot be deleted by mistake. A killed process leaves behind at most a database row and a partial file, which count
toward the limit until they are evicted.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

from shards.base.durable import flock
from shards.base.errors import RequestError, WorkError

DATABASE = "cache.sqlite"
INDEXES = "indexes"
"""Subfolder for the tables that `node.py` manages."""
WAIT_SECONDS = 0.02
TOUCH_SECONDS = 30.0
"""Minimum time in seconds between updates of a copy's last use, so that most reads do not write to the database."""


class Cache:
    """A cache folder, which several processes and runs may use concurrently."""

    def __init__(self, folder: Path, limit: int | None):
        """
        Args:
            limit: maximum total size of all copies in bytes; None for no limit.
        """
        self.folder = folder
        self.limit = limit
        self.touched: dict[str, float] = {}

    def check(self) -> None:
        """Check that the folder is absent, empty or a cache, without writing to it.

        Raises:
            RequestError: the folder contains other files, or is not a folder.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise RequestError(f"data.cache {self.folder} is a file. Set data.cache to a folder.")
        present = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        if present - {INDEXES} and DATABASE not in present:
            raise RequestError(
                f"data.cache {self.folder} contains files, but is not a latentmill cache. A cache deletes files, so "
                f"set data.cache to an empty folder or to one that does not exist yet."
            )

    def path(self, name: str) -> Path:
        """Return the path for the copy of the file `name`, whether or not the copy exists."""
        return self.folder / name

    def touch(self, name: str, size: int) -> bool:
        """Return whether a copy of the file `name` exists, and if so, record that it has just been used.

        Args:
            size: size of the file in bytes, for the record.
        """
        if not self.path(name).exists():
            return False
        now = time.time()
        if now - self.touched.get(name, 0.0) > TOUCH_SECONDS:
            self.touched[name] = now
            with self._database() as database:
                database.execute("INSERT OR REPLACE INTO copies VALUES (?, ?, ?)", (name, size, now))
        return True

    def add(
        self,
        name: str,
        size: int,
        download: Callable[[Path], None],
        sound: Callable[[Path], bool] = lambda copy: True,
    ) -> None:
        """Make room for `size` bytes and download a file, waiting while other downloads take up the space.

        Args:
            download: writes the file to the given path, and raises an error if its content is wrong.
            sound: returns whether the existing copy at the given path is intact, so that no download is needed.

        Raises:
            WorkError: the file alone exceeds the limit.
        """
        target, partial = self.path(name), partial_path(self.path(name))
        with self._database():
            pass  # create the database, because `check` would reject a folder that has files but no database
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock_copy(partial):
            if target.exists() and sound(target):  # another process has downloaded it in the meantime
                partial.unlink(missing_ok=True)
                return
            target.unlink(missing_ok=True)
            try:
                while not self._reserve(name, size):
                    time.sleep(WAIT_SECONDS)
                download(partial)
                with self._database():  # holding its lock keeps other processes from evicting the copy now
                    partial.replace(target)
            except BaseException:
                self.drop(name)
                raise

    def drop(self, name: str) -> None:
        """Remove the copy of the file `name`, its partial file and its database row."""
        with self._database() as database:
            database.execute("DELETE FROM copies WHERE name = ?", (name,))
            self._unlink(name)

    def usage(self) -> int:
        """Return the total size in bytes of all copies, including downloads in progress."""
        with self._database() as database:
            return int(database.execute("SELECT coalesce(sum(bytes), 0) FROM copies").fetchone()[0])

    def _reserve(self, name: str, size: int) -> bool:
        """Evict copies until `size` more bytes fit, and reserve them. Return False if too little can be evicted."""
        if self.limit is not None and size > self.limit:
            raise WorkError(f"{name} is {size} bytes, which exceeds data.cache_limit ({self.limit}). Raise the limit.")
        with self._database() as database:
            excess = 0
            if self.limit is not None:
                others = database.execute("SELECT coalesce(sum(bytes), 0) FROM copies WHERE name != ?", (name,))
                excess = others.fetchone()[0] + size - self.limit
            evicted = []
            # the index on `used` yields rows one by one, so that a large cache is not sorted for each download
            by_age = database.execute("SELECT name, bytes FROM copies WHERE name != ? ORDER BY used", (name,))
            while excess > 0 and (row := by_age.fetchone()):
                oldest, num_bytes = row
                with lock_copy(partial_path(self.path(oldest)), wait=False) as free:
                    if not free:
                        continue
                    self._unlink(oldest)
                evicted.append((oldest,))
                excess -= num_bytes
            database.executemany("DELETE FROM copies WHERE name = ?", evicted)
            if excess <= 0:
                database.execute("INSERT OR REPLACE INTO copies VALUES (?, ?, ?)", (name, size, time.time()))
            return excess <= 0

    def _unlink(self, name: str) -> None:
        """Remove the copy of the file `name` and its partial file, if they exist."""
        for path in (self.path(name), partial_path(self.path(name))):
            path.unlink(missing_ok=True)

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction that excludes all other processes from the database.

        Raises:
            WorkError: the database is damaged or cannot be opened.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with closing(sqlite3.connect(self.folder / DATABASE, timeout=60, isolation_level=None)) as database:
                database.execute("PRAGMA synchronous = OFF")  # after a power failure, only copies can be lost
                database.execute("BEGIN IMMEDIATE")
                database.execute("CREATE TABLE IF NOT EXISTS copies (name TEXT PRIMARY KEY, bytes INTEGER, used REAL)")
                database.execute("CREATE INDEX IF NOT EXISTS by_age ON copies (used)")
                yield database
                database.execute("COMMIT")
        except sqlite3.Error as error:
            raise WorkError(
                f"{self.folder / DATABASE} cannot be used: {error}. Remove the folder {self.folder}, which contains "
                f"only copies, and run the same command again."
            ) from error


def partial_path(path: Path) -> Path:
    """Return the path to which a copy is downloaded before it is renamed. The copy's lock is on this file as well."""
    return path.with_name(path.name + ".partial")


@contextmanager
def lock_copy(partial: Path, wait: bool = True) -> Iterator[bool]:
    """Take the exclusive lock on a copy, which the kernel releases when its holder dies. Yield whether it is held,
    which it always is if `wait` is true.

    Raises:
        RequestError: the file system does not support file locks.
    """
    # the folder is missing if a process was killed between adding its row and starting the download
    partial.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with partial.open("ab") as file:
            try:
                flock(file.fileno(), partial, wait)
                is_held = True
            except BlockingIOError:
                if wait:
                    raise
                is_held = False
            if not is_held or _is_still_at(file, partial):
                yield is_held
                return


def _is_still_at(file: IO[bytes], path: Path) -> bool:
    """Return whether no other process has renamed or removed an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
