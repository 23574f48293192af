"""Receipts of parts that do not exist, and a store with the latency of a remote one, for benchmarks and tests."""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from shards.base.store import Entry, LocalStore
from shards.format.receipts import FileRecord, MadeBy, MdsFile, Receipt, pack_bits
from shards.format.tables import REFUSED_NAME, SAMPLES_NAME

NAMES_PER_PAGE = 1000
"""Page size of an object store's listing."""


def synthetic_receipt(
    tar: str, bucket: str = "256x256", generation: int = 0, samples_of_files: Sequence[int] = (10, 10)
) -> Receipt:
    """Make a receipt like those of stage 1. Its MDS files are determined by the tar, bucket and generation."""
    part, samples = f"{tar}.{generation:08x}", sum(samples_of_files)
    mds = [
        MdsFile(
            basename=f"shard.{number:05d}.mds",
            bytes=174_200 * count,
            samples=count,
            hash=f"{hash_of(f'{bucket}/{part}/{number}'):016x}",
        )
        for number, count in enumerate(samples_of_files)
    ]
    files = {file.basename: FileRecord(bytes=file.bytes, sha256=f"{int(file.hash, 16):064x}") for file in mds}
    files |= {name: FileRecord(bytes=1, sha256=f"{hash_of(part):064x}") for name in (SAMPLES_NAME, REFUSED_NAME)}
    return Receipt(
        tar=tar,
        bucket=bucket,
        generation=generation,
        token="0" * 32,
        encoding_id="0" * 16,
        rule="covers",
        part=part,
        files=files,
        mds=tuple(mds),
        samples_in=samples,
        samples=samples,
        stored=pack_bits(np.ones(samples, bool)),
        refused={},
        rejects={},
        captions={},
        input={"address": f"s3://tars/{tar}.tar", "bytes": 1, "sha256": "0" * 64},
        shared_files={},
        software={},
        settings={},
        made_by=MadeBy(host="none", gpu="none", gpu_uuid=None, version="", source_sha256=""),
        attempts=1,
        started="",
        seconds={"total": 1.0},
    )


def hash_of(text: str) -> int:
    """Hash text to 61 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 3


class ThinStore(LocalStore):
    """A local store whose calls are delayed by `seconds` and counted, with up to `num_connections` concurrent reads."""

    def __init__(self, root: Path, seconds: float = 0.0, num_connections: int = 64):
        super().__init__(root)
        self.seconds = seconds
        self.num_connections = num_connections
        self.calls: Counter[str] = Counter()
        self.lock = threading.Lock()

    @contextmanager
    def _call(self, kind: str) -> Iterator[None]:
        with self.lock:
            self.calls[kind] += 1
        time.sleep(self.seconds)
        yield

    def read(self, name: str) -> bytes:
        with self._call("get"):
            return super().read(name)

    def read_many(self, names: list[str]) -> dict[str, bytes]:
        def read(name: str) -> bytes | None:
            try:
                return self.read(name)
            except FileNotFoundError:
                return None

        with ThreadPoolExecutor(self.num_connections) as pool:
            found = zip(names, pool.map(read, names), strict=True)
            return {name: data for name, data in found if data is not None}

    def listing(self, folder: str = "") -> dict[str, Entry]:
        found = super().listing(folder)
        for _ in range(0, max(len(found), 1), NAMES_PER_PAGE):  # pages are fetched one after another
            with self._call("list"):
                pass
        return found

    def create(self, name: str, data: bytes) -> bool:
        with self._call("put"):
            return super().create(name, data)

    def write(self, name: str, data: bytes) -> None:
        with self._call("put"):
            super().write(name, data)

    def put(self, files: Mapping[str, Path]) -> None:
        for name, path in files.items():
            with self._call("put"):
                super().put({name: path})
