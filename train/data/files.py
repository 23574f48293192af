"""The MDS files of all streams: fetched where they are remote, hashed before their first use, read sample by sample."""

import multiprocessing
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shards.base.durable import DamagedFile
from shards.base.errors import WorkError
from shards.base.store import Store
from shards.format.mds import HASH, Decoder, MdsIndex, hash_file, read_offsets, read_sample
from train.data.cache import Cache

NUM_FETCHERS = 8
"""Threads of one loader process that fetch and hash."""
DOWNLOAD_PAUSES = (0.5, 4.0)
"""Seconds before the second and third time that a file is fetched."""
NUM_LOCKS = 64
NUM_HEADERS = 1 << 14
"""Files whose offsets a loader process remembers."""


class StreamFiles:
    """One stream's files: in place, or as copies in a cache."""

    def __init__(self, store: Store, bucket: str, files: MdsIndex, cache: Cache | None, prefix: str):
        """`prefix`: the folder in the cache below which this root's copies lie; unused without one."""
        self.store = store
        self.bucket = bucket
        self.files = files
        self.cache = cache
        self.prefix = prefix
        self.decoder = Decoder(files.columns)
        # a store without a cache is a local folder, or the request was refused
        self.top = "" if cache is not None else store.where(bucket)

    def path(self, file: int) -> str:
        """Where a file is read."""
        name = self.files.name(file)
        return os.path.join(self.top, name) if self.cache is None else str(self.cache.path(self._copy(file)))

    def where(self, file: int) -> str:
        """Where the original is, for people."""
        return self.store.where(f"{self.bucket}/{self.files.name(file)}")

    def is_there(self, file: int) -> bool:
        """Whether it can be read now; a copy is marked as wanted."""
        return self.cache is None or self.cache.want(self._copy(file), int(self.files.sizes[file]))

    def open(self, file: int) -> int | None:
        """A descriptor of the file; None where a copy was there, and made room for another at that moment.

        Raises:
            WorkError: the original is not there, or not as its index says.
        """
        try:
            return os.open(self.path(file), os.O_RDONLY)
        except FileNotFoundError:
            if self.cache is None:
                with self._named(file):
                    raise
        descriptors: list[int] = []

        def download_and_open(target: Path) -> None:
            # opened before others can remove it, so that every fetch serves at least one read
            self._download(file, target)
            descriptors.append(os.open(target, os.O_RDONLY))

        with self._named(file):
            self.cache.add(self._copy(file), int(self.files.sizes[file]), download_and_open)
        return descriptors[0] if descriptors else None

    def make_ready(self, file: int) -> None:
        """Fetch the file, if it is remote and there is no copy, and hold it against its size and hash.

        A copy that is damaged is removed, and fetched again.

        Raises:
            DamagedFile: the original is damaged.
            WorkError: the original is not there, or cannot be read.
        """
        if self.cache is None:
            with self._named(file):
                self.check(file, self.path(file))
            return
        copy = self._copy(file)
        if self.is_there(file):
            try:
                self.check(file, self.path(file))
                return
            except FileNotFoundError:
                pass  # made room for another just now
            except DamagedFile as error:
                print(f"{error} It is a copy, and is fetched again.", flush=True)
        with self._named(file):
            self.cache.add(
                copy,
                int(self.files.sizes[file]),
                lambda target: self._download(file, target),
                # held against the index once more: another process may have fetched it again by now
                lambda target: self._is_sound(file, target),
            )

    def check(self, file: int, path: str) -> None:
        """Hold a file, or a copy of it, against what the index says.

        Raises:
            FileNotFoundError: it is not there.
            DamagedFile: its size or hash is another.
        """
        size, expected = os.stat(path).st_size, int(self.files.sizes[file])
        if size != expected:
            raise DamagedFile(
                f"{path}: {size} bytes, but the index says {expected} bytes. Restore the file from its copy."
            )
        if hash_file(path) != int(self.files.hashes[file]):
            raise DamagedFile(
                f"{path} is damaged: its {HASH} is not the one in its index. Restore the file from its copy."
            )

    def _is_sound(self, file: int, path: Path) -> bool:
        try:
            self.check(file, str(path))
        except (FileNotFoundError, DamagedFile):
            return False
        return True

    def _copy(self, file: int) -> str:
        # by content: where an address gets other data, a run that reads the old copies goes on with them
        return f"{self.prefix}/{self.bucket}/{int(self.files.hashes[file]):016x}/{self.files.name(file)}"

    def _download(self, file: int, target: Path) -> None:
        """Tried again after a pause where the store answers with an error, or the bytes are wrong on their way.

        Raises:
            DamagedFile: they are wrong each time.
            OSError, WorkError: the store did not give them.
        """
        for pause in (*DOWNLOAD_PAUSES, None):
            try:
                self.store.get(f"{self.bucket}/{self.files.name(file)}", target)
                return self.check(file, str(target))
            except FileNotFoundError:
                raise
            except DamagedFile as error:
                if pause is None:
                    raise DamagedFile(str(error).replace(str(target), self.where(file))) from None
            except (OSError, WorkError) as error:
                if pause is None:
                    raise
                print(f"{self.where(file)}: {error}. It is fetched again in {pause:g} s.", flush=True)
            time.sleep(pause)

    @contextmanager
    def _named(self, file: int) -> Any:
        try:
            yield
        except FileNotFoundError:
            raise WorkError(
                f"{self.where(file)}: no file, but the index says {self.files.sizes[file]} bytes. Restore the file "
                f"from its copy."
            ) from None
        except OSError as error:
            raise WorkError(f"{self.where(file)} cannot be read: {error}.") from error


class SampleReader:
    """All streams' files, numbered in one row; shared by the loader processes of a rank."""

    def __init__(self, buckets: Sequence[StreamFiles]):
        self.buckets = buckets
        counts = [len(bucket.files) for bucket in buckets]
        self.first = np.cumsum([0, *counts[:-1]])
        # what one loader process has verified, the others of its rank need not
        self.ready = torch.zeros(sum(counts), dtype=torch.uint8).share_memory_()
        self.locks = [multiprocessing.Lock() for _ in range(NUM_LOCKS)]
        self._in_this_process()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._in_this_process()

    def _in_this_process(self) -> None:
        self._is_ready: NDArray[np.uint8] = self.ready.numpy()
        self._pool: ThreadPoolExecutor | None = None
        self._coming: dict[int, Future[None]] = {}
        self._headers: OrderedDict[int, NDArray[np.uint32]] = OrderedDict()

    def locate(self, file: int) -> tuple[StreamFiles, int]:
        """The stream of a file, and its number there."""
        stream = int(np.searchsorted(self.first, file, side="right")) - 1
        return self.buckets[stream], file - int(self.first[stream])

    def announce(self, files: Iterable[int]) -> None:
        """Have threads make files ready that will be read soon."""
        for file in files:
            if file in self._coming:
                continue
            bucket, number = self.locate(file)
            if self._is_ready[file] and bucket.is_there(number):
                continue
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_FETCHERS)
            self._coming[file] = self._pool.submit(self.make_ready, file)

    def make_ready(self, file: int) -> None:
        """Raises WorkError where the file cannot be had as its index says it is."""
        bucket, number = self.locate(file)
        with self.locks[file % NUM_LOCKS]:
            if self._is_ready[file] and bucket.is_there(number):
                return
            bucket.make_ready(number)
            self._is_ready[file] = 1

    def sample(self, file: int, row: int) -> dict[str, Any]:
        """One sample, column by column; arrays are read-only.

        Raises:
            WorkError: the file cannot be had as its index says it is.
        """
        coming = self._coming.pop(file, None)
        if coming is not None:
            coming.result()
        elif not self._is_ready[file]:
            self.make_ready(file)
        bucket, number = self.locate(file)
        descriptor = None
        while descriptor is None:
            descriptor = bucket.open(number)
        try:
            return bucket.decoder(self._read(descriptor, file, row))
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int, file: int, row: int) -> bytes:
        bucket, number = self.locate(file)
        offsets = self._headers.get(file)
        if offsets is None:
            offsets = read_offsets(descriptor, int(bucket.files.samples[number]), bucket.path(number))
            self._headers[file] = offsets
            if len(self._headers) > NUM_HEADERS:
                self._headers.popitem(last=False)
        return read_sample(descriptor, offsets, row, bucket.path(number))
