"""Copies of remote MDS files in a local folder, within a limit of bytes, shared by the processes of a machine.

    CACHE/cache.sqlite            which copies there are, their bytes, when each was last wanted
    CACHE/<root>/256x256/00042/shard.00000.mds

A copy appears by a rename, once its size and hash were found to be right. Only what cache.sqlite lists is ever removed,
and the folder must be one that this module began, so that no original can be. A killed process leaves at most a row and
a part of a file, which count, and which go when their turn comes.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from shards.base.durable import flock
from shards.base.errors import RequestError, WorkError

DATABASE = "cache.sqlite"
INDEXES = "indexes"
"""A folder beside the copies, which `node.py` looks after."""
WAIT_SECONDS = 0.02
TOUCH_SECONDS = 30.0
"""A copy that is wanted again within this time is not marked again."""


class Cache:
    """A folder of copies. Safe to be used by many processes, and by several runs, at once."""

    def __init__(self, folder: Path, limit: int | None):
        """`limit`: bytes of all copies together; null: none."""
        self.folder = folder
        self.limit = limit
        self.touched: dict[str, float] = {}

    def check(self) -> None:
        """Refuse a folder that holds anything but a cache. Writes nothing.

        Raises:
            RequestError: it holds something else.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise RequestError(f"data.cache {self.folder} is no folder. Give one.")
        held = {place.name for place in self.folder.iterdir()} if self.folder.is_dir() else set()
        if held - {INDEXES} and DATABASE not in held:
            raise RequestError(
                f"data.cache {self.folder} holds files, and is not a cache of this program. Give an empty folder or "
                f"one that is not there yet: copies are removed from it."
            )

    def path(self, name: str) -> Path:
        """Where the copy of `name` lies, if it is there."""
        return self.folder / name

    def want(self, name: str, size: int) -> bool:
        """Whether there is a copy, of `size` bytes; if so, it is marked as used now."""
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
        """Make room for `size` bytes, and have `download` write them to the path that it is given.

        The copy appears if `download` returns; it raises where it got the wrong bytes. A copy that is there already is
        kept if it is `sound`. Waits where all the room is taken by copies on their way.

        Raises:
            WorkError: the file alone is larger than the limit.
        """
        target, partial = self.path(name), partial_path(self.path(name))
        with self._database():
            pass  # a folder without one would be refused the next time
        target.parent.mkdir(parents=True, exist_ok=True)
        with held(partial):
            if target.exists() and sound(target):  # another process was faster
                partial.unlink(missing_ok=True)
                return
            target.unlink(missing_ok=True)
            try:
                while not self._reserve(name, size):
                    time.sleep(WAIT_SECONDS)
                download(partial)
                with self._database():  # not while another process makes room
                    partial.replace(target)
            except BaseException:
                self.drop(name)
                raise

    def drop(self, name: str) -> None:
        """Remove the copy of `name`, and all trace of it."""
        with self._database() as database:
            database.execute("DELETE FROM copies WHERE name = ?", (name,))
            self._unlink(name)

    def usage(self) -> int:
        """Bytes of all copies, those on their way included."""
        with self._database() as database:
            return int(database.execute("SELECT coalesce(sum(bytes), 0) FROM copies").fetchone()[0])

    def _reserve(self, name: str, size: int) -> bool:
        """Note that `size` bytes are to come, if room could be made for them."""
        if self.limit is not None and size > self.limit:
            raise WorkError(f"{name} has {size} bytes, more than data.cache_limit {self.limit}. Raise it.")
        with self._database() as database:
            rows = database.execute("SELECT name, bytes FROM copies WHERE name != ? ORDER BY used", (name,))
            copies = rows.fetchall()
            excess = 0 if self.limit is None else sum(row[1] for row in copies) + size - self.limit
            for oldest, num_bytes in copies:
                if excess <= 0:
                    break
                with held_at_once(partial_path(self.path(oldest))) as free:
                    if not free:
                        continue
                    self._unlink(oldest)
                database.execute("DELETE FROM copies WHERE name = ?", (oldest,))
                excess -= num_bytes
            if excess <= 0:
                database.execute("INSERT OR REPLACE INTO copies VALUES (?, ?, ?)", (name, size, time.time()))
            return excess <= 0

    def _unlink(self, name: str) -> None:
        for path in (self.path(name), partial_path(self.path(name))):
            path.unlink(missing_ok=True)

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with closing(sqlite3.connect(self.folder / DATABASE, timeout=60, isolation_level=None)) as database:
                database.execute("PRAGMA synchronous = OFF")  # what a power cut spoils is only a copy
                database.execute("BEGIN IMMEDIATE")
                database.execute("CREATE TABLE IF NOT EXISTS copies (name TEXT PRIMARY KEY, bytes INTEGER, used REAL)")
                yield database
                database.execute("COMMIT")
        except sqlite3.Error as error:
            raise WorkError(
                f"{self.folder / DATABASE} cannot be used: {error}. Remove the folder {self.folder} (it holds copies "
                f"only) and start again."
            ) from error


def partial_path(path: Path) -> Path:
    """Where a copy is written before it is whole."""
    return path.with_name(path.name + ".partial")


@contextmanager
def held(partial: Path) -> Iterator[None]:
    """Be the only one who writes this copy; the kernel lets the next one in when the holder dies."""
    descriptor = None
    while descriptor is None:
        descriptor = _hold(partial)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def held_at_once(partial: Path) -> Iterator[bool]:
    """The same without waiting; false where someone else writes this copy."""
    partial.parent.mkdir(parents=True, exist_ok=True)  # of a row whose copy a killed process never began
    try:
        descriptor = _hold(partial, wait=False)
    except BlockingIOError:
        descriptor = None
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _hold(partial: Path, wait: bool = True) -> int | None:
    """A descriptor that holds the lock; None where it is on a file that its last holder renamed or removed.

    Raises:
        BlockingIOError: another process holds it, and `wait` is false.
        RequestError: the file system does not support file locks.
    """
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT)
    try:
        flock(descriptor, partial, wait)
    except (OSError, RequestError):
        os.close(descriptor)
        raise
    try:
        if os.path.samestat(os.stat(partial), os.fstat(descriptor)):
            return descriptor
    except FileNotFoundError:
        pass
    os.close(descriptor)
    return None
