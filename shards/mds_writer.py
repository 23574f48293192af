"""streaming's MDSWriter, the same bytes for less work: each is read once for both hashes, and copied into no whole."""

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash
from streaming import MDSWriter

from shards.buckets import Bucket
from shards.encoding import EncodingRecord
from shards.files import fsync_file
from shards.receipts import FileRecord

SHARD_BYTES = 1 << 27


class PartMDSWriter(MDSWriter):
    """Writes the MDS files of a part. A full file goes to the disk while the next one is being filled."""

    def __init__(self, folder: Path, encoding: EncodingRecord, bucket: Bucket):
        super().__init__(out=str(folder), columns=encoding.columns(bucket), hashes=["xxh3_64"], size_limit=SHARD_BYTES)
        self.records: dict[str, FileRecord] = {}
        """File → size and SHA-256, of the files written so far."""
        self.disk = ThreadPoolExecutor(1)
        self.syncing: list[Future[None]] = []

    def flush_shard(self) -> None:
        """Write the samples held as one file. (streaming's joins them first, three times their bytes in memory.)"""
        name, _ = self._name_next_shard()
        sizes = [len(sample) for sample in self.new_samples]
        offsets = np.array([0, *sizes]).cumsum() + 4 + 4 * (len(sizes) + 1) + len(self.config_data)
        header = np.uint32(len(sizes)).tobytes() + offsets.astype(np.uint32).tobytes() + self.config_data
        sha256, xxh3 = hashlib.sha256(), xxhash.xxh3_64()
        path = os.path.join(self.local, name)
        with open(path, "wb") as file:
            for piece in (header, *self.new_samples):
                file.write(piece)
                sha256.update(piece)
                xxh3.update(piece)
        size = int(offsets[-1])
        raw_data = {"basename": name, "bytes": size, "hashes": {"xxh3_64": xxh3.hexdigest()}}
        entry = {"samples": len(sizes), "raw_data": raw_data, "zip_data": None}
        self.shards.append(entry | self.get_config())
        self.records[name] = FileRecord(bytes=size, sha256=sha256.hexdigest())
        self.syncing.append(self.disk.submit(fsync_file, path))

    def finish(self) -> None:
        """Write what is left, and the index; everything but the index is on the disk then.

        Raises:
            OSError: the disk did not take a file.
        """
        super().finish()
        self.disk.shutdown()
        for written in self.syncing:
            written.result()
