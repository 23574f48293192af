"""streaming's MDSWriter, the same bytes for less work: each is copied once, and read once for both hashes.

A part's samples gather in one buffer, laid out as the file will have them; it is as large as a file, and serves one
file after the other. (streaming copies an array four times, into fresh memory, whose first touch costs more than the
copy.)
"""

import hashlib
import os
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from streaming import MDSWriter
from streaming.base.format.mds.encodings import mds_encode

from shards.base.files import fsync_file
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.receipts import FileRecord

SHARD_BYTES = 1 << 27
BLOCK_BYTES = 1 << 20
"""Are hashed and written together, while they are in the processor's cache."""
SPARE_BUFFERS = 2


_spare: queue.Queue[NDArray[np.uint8]] = queue.Queue(SPARE_BUFFERS)
"""Buffers of finished parts, for the next ones: the kernel takes longer to clear fresh memory than it takes to fill."""


class PartMDSWriter(MDSWriter):
    """Writes the MDS files of a part. A full file goes to the disk while the next one is being filled."""

    def __init__(self, folder: Path, encoding: EncodingRecord, bucket: Bucket):
        super().__init__(out=str(folder), columns=encoding.columns(bucket), hashes=["xxh3_64"], size_limit=SHARD_BYTES)
        self.records: dict[str, FileRecord] = {}
        """File → size and SHA-256, of the files written so far."""
        self.arrays = {
            name: (np.dtype(dtype), tuple(map(int, shape.split(","))))
            for name, (_, dtype, shape) in zip(self.columns, map(split_type, self.columns.values()), strict=True)
            if shape
        }
        """Column → dtype and shape, of those whose arrays are all alike."""
        try:
            self.buffer = _spare.get_nowait()
        except queue.Empty:
            self.buffer = np.empty(SHARD_BYTES, np.uint8)  # takes memory as it is filled
        self.disk = ThreadPoolExecutor(1)
        self.syncing: list[Future[None]] = []

    def _reset_cache(self) -> None:
        super()._reset_cache()
        self.ends = [0]
        """Where each sample held ends in the buffer."""

    def write(self, sample: dict[str, Any]) -> None:
        """Append one sample.

        Raises:
            ValueError: an array has not the dtype and shape of its column.
        """
        pieces = self._pieces(sample)
        size = sum(map(len, pieces))
        # the file's head holds where each sample begins
        if self.extra_bytes_per_shard + self.ends[-1] + size + 4 * len(self.ends) > SHARD_BYTES:
            self.flush_shard()
        at = self.ends[-1]
        if at + size > len(self.buffer):  # one sample is more than a file
            self.buffer = np.concatenate([self.buffer[:at], np.empty(size, np.uint8)])
        for piece in pieces:
            self.buffer[at : at + len(piece)] = piece
            at += len(piece)
        self.ends.append(at)

    def _pieces(self, sample: dict[str, Any]) -> list[NDArray[np.uint8]]:
        """What `encode_sample` gives, in pieces: the sizes of columns that vary, and each column's bytes."""
        sizes, pieces = [], []
        for name, encoding, size in zip(self.column_names, self.column_encodings, self.column_sizes, strict=True):
            value = sample[name]
            if name not in self.arrays:
                piece = np.frombuffer(mds_encode(encoding, value), np.uint8)
            elif self.arrays[name] == (value.dtype, value.shape):
                piece = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            else:
                raise ValueError(f"{name} has dtype {value.dtype} and shape {value.shape}; its column is {encoding}")
            if size is None:
                sizes.append(len(piece))
            pieces.append(piece)
        return [np.array(sizes, np.uint32).view(np.uint8), *pieces]

    def flush_shard(self) -> None:
        """Write the samples held as one file."""
        name, _ = self._name_next_shard()
        num_samples, held = len(self.ends) - 1, self.buffer[: self.ends[-1]]
        offsets = np.array(self.ends) + 4 + 4 * len(self.ends) + len(self.config_data)
        header = np.uint32(num_samples).tobytes() + offsets.astype(np.uint32).tobytes() + self.config_data
        sha256, xxh3 = hashlib.sha256(), xxhash.xxh3_64()
        path = os.path.join(self.local, name)
        with open(path, "wb") as file:
            for piece in (header, *(held[at : at + BLOCK_BYTES].data for at in range(0, len(held), BLOCK_BYTES))):
                file.write(piece)
                sha256.update(piece)
                xxh3.update(piece)
        size = int(offsets[-1])
        raw_data = {"basename": name, "bytes": size, "hashes": {"xxh3_64": xxh3.hexdigest()}}
        entry = {"samples": num_samples, "raw_data": raw_data, "zip_data": None}
        self.shards.append(entry | self.get_config())
        self.records[name] = FileRecord(bytes=size, sha256=sha256.hexdigest())
        self.syncing.append(self.disk.submit(fsync_file, path, forget=True))
        self._reset_cache()

    def finish(self) -> None:
        """Write what is left, and the index; everything but the index is on the disk then.

        Raises:
            OSError: the disk did not take a file.
        """
        if len(self.ends) > 1:
            self.flush_shard()
        super().finish()
        if len(self.buffer) == SHARD_BYTES:
            with suppress(queue.Full):
                _spare.put_nowait(self.buffer)
        del self.buffer  # it is another writer's from now on
        self.disk.shutdown()
        for written in self.syncing:
            written.result()


def split_type(column: str) -> tuple[str, str, str]:
    """`ndarray:float16:8,32,32` → its three parts; those that a type has not are empty."""
    kind, dtype, shape = [*column.split(":"), "", ""][:3]
    return kind, dtype, shape
