"""The MDS files of a part and their index, in the bytes of streaming's MDSWriter; the format is in `mds.py`.

Each byte is copied once, and read once for both hashes: a part's samples gather in one buffer, laid out as the file
will have them; it is as large as a file, and serves one file after the other. (MDSWriter copies an array four times,
into fresh memory, whose first touch costs more than the copy.)
"""

import hashlib
import json
import queue
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shards.base.durable import fsync_file
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.mds import HASH, Column, array_type, shape_head
from shards.format.receipts import FileRecord

FILE_BYTES = 1 << 27
BLOCK_BYTES = 1 << 20
"""Are hashed and written together, while they are in the processor's cache."""
SPARE_BUFFERS = 2


_spare: queue.Queue[NDArray[np.uint8]] = queue.Queue(SPARE_BUFFERS)
"""Buffers of finished parts, for the next ones: the kernel takes longer to clear fresh memory than it takes to fill."""


def file_config(columns: Sequence[Column]) -> dict[str, Any]:
    """What each file's head and its entry in the index say of its columns, which are sorted by name."""
    return {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [HASH],
        "size_limit": FILE_BYTES,
        **{f"column_{field}s": list(map(attrgetter(field), columns)) for field in ("name", "encoding", "size")},
    }


class PartMDSWriter:
    """Writes the MDS files of a part into a new folder. A full file goes to the disk while the next is being filled."""

    def __init__(self, folder: Path, encoding: EncodingRecord, bucket: Bucket):
        folder.mkdir(parents=True)
        self.folder = folder
        columns = [Column.of(name, kind) for name, kind in sorted(encoding.columns(bucket).items())]
        self.columns = [(column, *array_type(column.encoding)) for column in columns]
        self.config = file_config(columns)
        self.config_data = json.dumps(self.config, sort_keys=True).encode()
        self.entries: list[dict[str, Any]] = []
        """Of the index, one for each file written so far."""
        self.records: dict[str, FileRecord] = {}
        """File → size and SHA-256, of the files written so far."""
        self.ends = [0]
        """Where each sample held ends in the buffer."""
        try:
            self.buffer = _spare.get_nowait()
        except queue.Empty:
            self.buffer = np.empty(FILE_BYTES, np.uint8)  # takes memory as it is filled
        self.disk = ThreadPoolExecutor(1)
        self.syncing: list[Future[None]] = []

    def write(self, sample: dict[str, Any]) -> None:
        """Append one sample.

        Raises:
            ValueError: an array has not the dtype and shape of its column, or no elements.
        """
        pieces = self._pieces(sample)
        size = sum(map(len, pieces))
        # the file's head: how many samples, and where each begins and the last one ends
        head = 4 + 4 * (len(self.ends) + 1) + len(self.config_data)
        if head + self.ends[-1] + size > FILE_BYTES:
            self._write_file()
        at = self.ends[-1]
        if at + size > len(self.buffer):  # one sample is more than a file
            self.buffer = np.concatenate([self.buffer[:at], np.empty(size, np.uint8)])
        held = self.buffer.data
        for piece in pieces:
            held[at : at + len(piece)] = piece
            at += len(piece)
        self.ends.append(at)

    def _pieces(self, sample: dict[str, Any]) -> list[bytes | memoryview]:
        """The sizes of columns that vary, then each column's bytes."""
        sizes: list[int] = []
        pieces: list[bytes | memoryview] = []
        for column, dtype, shape in self.columns:
            value = sample[column.name]
            parts: list[bytes | memoryview]
            if dtype is None:
                parts = [value.encode()]
            elif value.dtype != dtype or shape not in (None, value.shape) or not value.size:
                raise ValueError(
                    f"{column.name} has dtype {value.dtype} and shape {value.shape}; its column is {column.encoding}"
                )
            else:
                parts = [np.ascontiguousarray(value).data.cast("B")]
                if shape is None:
                    parts.insert(0, shape_head(value.shape))
            if column.size is None:
                sizes.append(sum(map(len, parts)))
            pieces += parts
        return [np.array(sizes, np.uint32).tobytes(), *pieces]

    def _write_file(self) -> None:
        """Write the samples held as one file."""
        name = f"shard.{len(self.entries):05}.mds"
        num_samples, held = len(self.ends) - 1, self.buffer[: self.ends[-1]]
        offsets = np.array(self.ends) + 4 + 4 * len(self.ends) + len(self.config_data)
        header = np.uint32(num_samples).tobytes() + offsets.astype(np.uint32).tobytes() + self.config_data
        sha256, xxh3 = hashlib.sha256(), xxhash.xxh3_64()
        blocks: list[bytes | memoryview] = [header]
        blocks += [held[at : at + BLOCK_BYTES].data for at in range(0, len(held), BLOCK_BYTES)]
        with open(self.folder / name, "wb") as file:
            for block in blocks:
                file.write(block)
                sha256.update(block)
                xxh3.update(block)
        size = int(offsets[-1])
        raw_data = {"basename": name, "bytes": size, "hashes": {HASH: xxh3.hexdigest()}}
        self.entries.append(self.config | {"samples": num_samples, "raw_data": raw_data, "zip_data": None})
        self.records[name] = FileRecord(bytes=size, sha256=sha256.hexdigest())
        self.syncing.append(self.disk.submit(fsync_file, self.folder / name, forget=True))
        self.ends = [0]

    def finish(self) -> None:
        """Write what is left, and the index; everything but the index is on the disk then.

        Raises:
            OSError: the disk did not take a file.
        """
        if len(self.ends) > 1:
            self._write_file()
        (self.folder / "index.json").write_text(json.dumps({"version": 2, "shards": self.entries}, sort_keys=True))
        if len(self.buffer) == FILE_BYTES:
            with suppress(queue.Full):
                _spare.put_nowait(self.buffer)
        del self.buffer  # it is another writer's from now on
        self.disk.shutdown()
        for written in self.syncing:
            written.result()
