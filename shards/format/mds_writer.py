"""Writer of a part's MDS files and index, byte-identical to streaming's MDSWriter. `mds.py` describes the format.

Samples are gathered in one reusable buffer of a file's size, in the file's layout, so that each byte is copied only
once, and read only once for both hashes. MDSWriter copies each array four times into fresh memory, and the resulting
page faults cost more than the copies.
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
from shards.format.mds import HASH, Column, array_type, shape_header
from shards.format.receipts import FileRecord, MdsFile
from shards.format.text import TEXT_SAMPLE, kind_of

FILE_BYTES = 1 << 27
BLOCK_BYTES = 1 << 20
"""Size of the blocks that are hashed and written together while they are in the CPU cache."""
SPARE_BUFFERS = 2


_spare: queue.Queue[NDArray[np.uint8]] = queue.Queue(SPARE_BUFFERS)
"""Buffers of finished parts, kept for reuse, because the kernel takes longer to clear fresh memory than the writer
takes to fill it."""


def file_config(columns: Sequence[Column]) -> dict[str, Any]:
    """Return the description of the columns, sorted by name, that each file's header and index entry contain."""
    return {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [HASH],
        "size_limit": FILE_BYTES,
        **{f"column_{field}s": list(map(attrgetter(field), columns)) for field in ("name", "encoding", "size")},
    }


class PartMDSWriter:
    """Writer that stores a part's MDS files in a new folder. A full file is flushed to disk while the next one is being
    filled."""

    def __init__(self, folder: Path, encoding: EncodingRecord, bucket: Bucket):
        folder.mkdir(parents=True)
        self.folder = folder
        columns = [Column.of(name, kind) for name, kind in sorted(encoding.columns(bucket).items())]
        self.columns = [(column, *array_type(column.encoding)) for column in columns]
        self.config = file_config(columns)
        self.config_data = json.dumps(self.config, sort_keys=True).encode()
        self.first_with_text: dict[int, int] | None = {} if encoding.deduplicates_text else None
        """Hash of text latents → number of the first buffered sample with it; None: no de-duplication."""
        self.files: list[MdsFile] = []
        """Files written so far."""
        self.records: dict[str, FileRecord] = {}
        """File name → size and SHA-256, for the files written so far."""
        self.ends = [0]
        """End of each buffered sample, as an offset in the buffer."""
        try:
            self.buffer = _spare.get_nowait()
        except queue.Empty:
            self.buffer = np.empty(FILE_BYTES, np.uint8)  # pages are allocated only as they are filled
        self.disk = ThreadPoolExecutor(1)
        self.syncing: list[Future[None]] = []

    def write(self, sample: dict[str, Any]) -> None:
        """Append one sample. Raises ValueError if an array is empty, or its dtype or shape does not match its
        column."""
        pieces = self._pieces(*self._without_repeats(sample))
        size = sum(map(len, pieces))
        # header: the number of samples, each sample's start, the last sample's end, and the JSON of the columns
        header_bytes = 4 + 4 * (len(self.ends) + 1) + len(self.config_data)
        if header_bytes + self.ends[-1] + size > FILE_BYTES:
            self._write_file()
            pieces = self._pieces(*self._without_repeats(sample))  # it may refer to a sample in the file just written
            size = sum(map(len, pieces))
        at = self.ends[-1]
        if at + size > len(self.buffer):  # a single sample larger than a file
            self.buffer = np.concatenate([self.buffer[:at], np.empty(size, np.uint8)])
        view = self.buffer.data
        for piece in pieces:
            view[at : at + len(piece)] = piece
            at += len(piece)
        self.ends.append(at)

    def _without_repeats(self, sample: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Set the sample's `text_sample`, and replace its text columns with empty arrays if a buffered sample has the
        same text. Also return whether such a sample was found."""
        if self.first_with_text is None:
            return sample, False
        text = {name: np.ascontiguousarray(value) for name, value in sample.items() if kind_of(name)}
        digest = xxhash.xxh3_128()
        for name in sorted(text):
            digest.update(f"{name} {text[name].shape} ")
            digest.update(text[name].data.cast("B"))
        row = len(self.ends) - 1
        first = self.first_with_text.setdefault(digest.intdigest(), row)
        empty = {name: np.empty(0, value.dtype) for name, value in text.items()} if first != row else {}
        return sample | empty | {TEXT_SAMPLE: np.array([first], np.int32)}, first != row

    def _pieces(self, sample: dict[str, Any], is_repeat: bool) -> list[bytes | memoryview]:
        """Return the sizes of the variable-size columns, followed by each column's bytes."""
        sizes: list[int] = []
        pieces: list[bytes | memoryview] = []
        for column, dtype, shape in self.columns:
            value = sample[column.name]
            parts: list[bytes | memoryview]
            if dtype is None:
                parts = [value.encode()]
            elif (
                value.dtype != dtype
                or shape not in (None, value.shape)
                or not (value.size or (is_repeat and kind_of(column.name)))
            ):
                raise ValueError(
                    f"{column.name} has dtype {value.dtype} and shape {value.shape}, but its type is {column.encoding}"
                )
            else:
                parts = [np.ascontiguousarray(value).data.cast("B")]
                if shape is None:
                    parts.insert(0, shape_header(value.shape))
            if column.size is None:
                sizes.append(sum(map(len, parts)))
            pieces += parts
        return [np.array(sizes, np.uint32).tobytes(), *pieces]

    def _write_file(self) -> None:
        """Write the buffered samples to one file."""
        name = f"shard.{len(self.files):05}.mds"
        num_samples, samples = len(self.ends) - 1, self.buffer[: self.ends[-1]]
        offsets = np.array(self.ends) + 4 + 4 * len(self.ends) + len(self.config_data)
        header = np.uint32(num_samples).tobytes() + offsets.astype(np.uint32).tobytes() + self.config_data
        sha256, xxh3 = hashlib.sha256(), xxhash.xxh3_64()
        blocks: list[bytes | memoryview] = [header]
        blocks += [samples[at : at + BLOCK_BYTES].data for at in range(0, len(samples), BLOCK_BYTES)]
        with open(self.folder / name, "wb") as file:
            for block in blocks:
                file.write(block)
                sha256.update(block)
                xxh3.update(block)
        size = int(offsets[-1])
        self.files.append(MdsFile(basename=name, bytes=size, samples=num_samples, hash=xxh3.hexdigest()))
        self.records[name] = FileRecord(bytes=size, sha256=sha256.hexdigest())
        self.syncing.append(self.disk.submit(fsync_file, self.folder / name, forget=True))
        self.ends = [0]
        if self.first_with_text is not None:
            self.first_with_text = {}

    def finish(self) -> None:
        """Write the remaining samples and the index. On return, every file except the index has been flushed to disk.
        Raises OSError if a flush failed."""
        if len(self.ends) > 1:
            self._write_file()
        entries = []
        for file in self.files:
            raw_data = {"basename": file.basename, "bytes": file.bytes, "hashes": {HASH: file.hash}}
            entries.append(self.config | {"samples": file.samples, "raw_data": raw_data, "zip_data": None})
        (self.folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}, sort_keys=True))
        if len(self.buffer) == FILE_BYTES:
            with suppress(queue.Full):
                _spare.put_nowait(self.buffer)
        del self.buffer  # from now on, another writer may use it
        self.disk.shutdown()
        for written in self.syncing:
            written.result()
