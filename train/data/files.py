"""Downloading the MDS files of all streams, verifying each file's hash before its first use, and reading samples."""

import multiprocessing
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
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
from shards.format.mds import HASH, Decoder, MdsIndex, hash_file, read_offsets, read_sample, reader
from shards.format.text import with_duplicate_text
from train.data.cache import Cache

NUM_FETCHERS = 8
"""Number of threads per loader worker that download and hash files."""
DOWNLOAD_PAUSES = (0.5, 4.0)
"""Pauses in seconds before the second and the third attempt to download a file."""
NUM_LOCKS = 64
NUM_HEADERS = 1 << 14
"""Number of files whose sample offsets a loader worker keeps in memory."""


class StreamFiles:
    """The files of one stream, read in place or through a cache."""

    def __init__(self, store: Store, bucket: str, files: MdsIndex, cache: Cache | None, prefix: str):
        """
        Args:
            prefix: the cache's subfolder for copies from this root.
        """
        self.store = store
        self.bucket = bucket
        self.files = files
        self.cache = cache
        self.prefix = prefix
        self.decoder = Decoder(files.columns)
        # without a cache, the store is local; `check_locations` rejects remote roots that have no cache
        self.top = "" if cache is not None else store.where(bucket)

    def path(self, file: int) -> str:
        """Return the local path from which a file is read."""
        name = self.files.name(file)
        return os.path.join(self.top, name) if self.cache is None else str(self.cache.path(self._cached_name(file)))

    def where(self, file: int) -> str:
        """Return the path or URL of the original file, for messages."""
        return self.store.where(f"{self.bucket}/{self.files.name(file)}")

    def is_available(self, file: int) -> bool:
        """Return whether a file can be read without a download. A cached copy is marked as used."""
        return self.cache is None or self.cache.touch(self._cached_name(file), int(self.files.sizes[file]))

    def open(self, file: int) -> int | None:
        """Open a file, downloading it if necessary, and return a file descriptor.

        Return None if the file's cached copy has just been evicted, in which case the caller must retry.

        Raises:
            WorkError: the original file is missing, or does not match its index.
        """
        try:
            return os.open(self.path(file), os.O_RDONLY)
        except FileNotFoundError:
            if self.cache is None:
                with self._named_errors(file):
                    raise
        descriptors: list[int] = []

        def download_and_open(target: Path) -> None:
            # opened before the copy can be evicted, so that every download serves at least one read
            self._download(file, target)
            descriptors.append(os.open(target, os.O_RDONLY))

        with self._named_errors(file):
            self.cache.add(self._cached_name(file), int(self.files.sizes[file]), download_and_open)
        return descriptors[0] if descriptors else None

    def make_ready(self, file: int) -> None:
        """Download a file unless it is local or cached, and verify its size and hash.

        A damaged cached copy is downloaded again.

        Raises:
            DamagedFile: the original file is damaged.
            WorkError: the original file is missing or cannot be read.
        """
        if self.cache is None:
            with self._named_errors(file):
                self.check(file, self.path(file))
            return
        if self.is_available(file):
            try:
                self.check(file, self.path(file))
                return
            except FileNotFoundError:
                pass  # evicted just now
            except DamagedFile as error:
                print(f"{error} This file is only a cached copy, so it will be downloaded again instead.", flush=True)
        with self._named_errors(file):
            self.cache.add(
                self._cached_name(file),
                int(self.files.sizes[file]),
                lambda target: self._download(file, target),
                # the copy is verified again, because another process may have replaced it in the meantime
                lambda target: self._is_sound(file, target),
            )

    def check(self, file: int, path: str) -> None:
        """Verify the size and hash of a file, or of its cached copy, against the index.

        Raises:
            FileNotFoundError: the file is missing.
            DamagedFile: its size or hash does not match the index.
        """
        size, expected = os.stat(path).st_size, int(self.files.sizes[file])
        if size != expected:
            raise DamagedFile(
                f"{path} is {size} bytes long, but its index lists {expected} bytes. Restore the file from a backup."
            )
        if hash_file(path) != int(self.files.hashes[file]):
            raise DamagedFile(f"{path} is damaged: its {HASH} does not match its index. Restore it from a backup.")

    def _is_sound(self, file: int, path: Path) -> bool:
        """Return whether a copy exists and passes `check`."""
        try:
            self.check(file, str(path))
        except (FileNotFoundError, DamagedFile):
            return False
        return True

    def _cached_name(self, file: int) -> str:
        """Return the name of a file's copy in the cache."""
        # named by content hash, so that a run keeps reading its own copies even if the data at the root's URL changes
        return f"{self.prefix}/{self.bucket}/{int(self.files.hashes[file]):016x}/{self.files.name(file)}"

    def _download(self, file: int, target: Path) -> None:
        """Download and verify a file. Store errors and corrupt downloads are retried after a pause.

        Raises:
            DamagedFile: every download was corrupt.
            OSError, WorkError: the store failed every time.
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
                print(f"Downloading {self.where(file)} failed: {error}. Retrying in {pause:g} s.", flush=True)
            time.sleep(pause)

    @contextmanager
    def _named_errors(self, file: int) -> Iterator[None]:
        """Turn an OSError about a file into a WorkError that names the original file."""
        try:
            yield
        except FileNotFoundError:
            raise WorkError(
                f"{self.where(file)} is missing, but its index lists {self.files.sizes[file]} bytes. Restore the file "
                f"from a backup."
            ) from None
        except OSError as error:
            raise WorkError(
                f"{self.where(file)} cannot be read: {error}. Restore access to the storage, and run the same command "
                f"again."
            ) from error


class SampleReader:
    """Reader of samples from the files of all streams. A rank's loader workers share one reader.

    The files are numbered consecutively across the streams.
    """

    def __init__(self, buckets: Sequence[StreamFiles]):
        self.buckets = buckets
        counts = [len(bucket.files) for bucket in buckets]
        self.first = np.cumsum([0, *counts[:-1]])
        # in shared memory, so that only one of the rank's loader workers verifies each file
        self.ready = torch.zeros(sum(counts), dtype=torch.uint8).share_memory_()
        self.locks = [multiprocessing.Lock() for _ in range(NUM_LOCKS)]
        self._is_ready: NDArray[np.uint8] = self.ready.numpy()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: dict[int, Future[None]] = {}
        self._headers: OrderedDict[int, NDArray[np.uint32]] = OrderedDict()

    def locate(self, file: int) -> tuple[StreamFiles, int]:
        """Return the stream of a file, and the file's number within it."""
        stream = int(np.searchsorted(self.first, file, side="right")) - 1
        return self.buckets[stream], file - int(self.first[stream])

    def prefetch(self, files: Iterable[int]) -> None:
        """Start downloading and verifying files that will be read soon, in background threads."""
        for file in files:
            if file in self._pending:
                continue
            bucket, number = self.locate(file)
            if self._is_ready[file] and bucket.is_available(number):
                continue
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_FETCHERS)
            self._pending[file] = self._pool.submit(self.make_ready, file)

    def make_ready(self, file: int) -> None:
        """Download a file if necessary and verify it, once per rank.

        It raises the same errors as `StreamFiles.make_ready`.
        """
        bucket, number = self.locate(file)
        with self.locks[file % NUM_LOCKS]:
            if self._is_ready[file] and bucket.is_available(number):
                return
            bucket.make_ready(number)
            self._is_ready[file] = 1

    def sample(self, file: int, row: int) -> dict[str, Any]:
        """Read one sample as a dict from column to value. Its arrays are read-only.

        Raises:
            WorkError: the file is missing, damaged or unreadable.
        """
        pending = self._pending.pop(file, None)
        if pending is not None:
            pending.result()
        elif not self._is_ready[file]:
            self.make_ready(file)
        bucket, number = self.locate(file)
        descriptor = None
        while descriptor is None:
            descriptor = bucket.open(number)

        def read(row: int) -> dict[str, Any]:
            return bucket.decoder(self._read(descriptor, file, row))

        try:
            return with_duplicate_text(read(row), row, read)
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int, file: int, row: int) -> bytes:
        """Read the stored bytes of a sample, caching the file's sample offsets."""
        bucket, number = self.locate(file)
        offsets = self._headers.get(file)
        if offsets is None:
            offsets = read_offsets(reader(descriptor), int(bucket.files.samples[number]), bucket.path(number))
            self._headers[file] = offsets
            if len(self._headers) > NUM_HEADERS:
                self._headers.popitem(last=False)
        return read_sample(reader(descriptor), offsets, row, bucket.path(number))
