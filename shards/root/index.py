"""BUCKET/index.json: streaming's own index, built from receipts and never from a listing.

`streaming.base.util.merge_index` keeps only the leaf folder's name and fails on foreign JSON files, so the index is
written here. The same parts always give the same bytes.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from shards.base.scratch import attempt_folder
from shards.base.store import Store
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.mds import HASH, Column
from shards.format.mds_writer import file_config
from shards.format.receipts import Receipt
from shards.root.manifest import Manifest, load_rows, read_index
from shards.root.publish import Publisher
from shards.root.segments import files_of, make_rows, merge

HOLE = "\0"
FILES_AT_ONCE = 1 << 14
ROWS_AT_ONCE = 64
"""Receipts of a bucket that are held before they become rows."""


def write_indexes(store: Store) -> dict[str, int]:
    """Publish what is committed, and write every bucket's index.json; returns bucket → samples in it."""
    manifest = Publisher(store).publish()
    write_streaming(store, manifest)
    return {bucket: size.samples for bucket, size in manifest.buckets.items()}


def write_streaming(store: Store, manifest: Manifest) -> None:
    """Write the index.json of every bucket of a manifest."""
    for bucket, size in manifest.buckets.items():
        index = read_index(store, bucket, size.id)
        pieces = bucket_index(EncodingRecord.load(store), bucket, load_rows(store, size.id, index))
        _write(store, bucket, pieces)


def index_columns(encoding: EncodingRecord, bucket: str) -> list[Column]:
    """What the MDS files of a bucket hold, in their order."""
    types = encoding.columns(Bucket.parse(bucket))
    return [Column.of(name, types[name]) for name in sorted(types)]


def compact_json(value: Any) -> bytes:
    """On one line, with sorted keys."""
    return (json.dumps(value, sort_keys=True, ensure_ascii=False) + "\n").encode()


def bucket_index(encoding: EncodingRecord, bucket: str, rows: pa.Table) -> Iterator[bytes]:
    """ROOT/BUCKET/index.json over these parts, in pieces: a whole one may have 600 MB."""
    # a million entries as Python objects would take gigabytes: two are dumped with their own values left open
    config = file_config(index_columns(encoding, bucket))
    raw_data = {"basename": HOLE, "bytes": HOLE, "hashes": {HASH: HOLE}}
    entry = config | {"raw_data": raw_data, "samples": HOLE, "zip_data": None}
    files, hole = files_of(rows), json.dumps(HOLE).encode()
    if not len(files):
        yield compact_json({"version": 2, "shards": []})
        return
    head, *between, tail = compact_json({"version": 2, "shards": [entry, entry]}).split(hole)
    joints, next_head = [head, *between[:3]], between[3]
    for batch in files.to_batches(max_chunksize=FILES_AT_ONCE):
        piece: list[bytes] = []
        for values in zip(*(batch[name].to_pylist() for name in ("name", "bytes", "hash", "samples")), strict=True):
            for joint, value in zip(joints, _written(*values), strict=True):
                piece += joint, value
            joints[0] = next_head
        yield b"".join(piece)
    yield tail


def _written(name: bytes, size: int, hash: int, samples: int) -> Iterable[bytes]:
    return (
        json.dumps(name.decode(), ensure_ascii=False).encode(),
        str(size).encode(),
        f'"{hash:016x}"'.encode(),
        str(samples).encode(),
    )


class RowsByBucket:
    """Receipts, collected as rows of parts: compact tables of a bucket each, such as indexes are made of."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Receipt]] = {}
        self.pieces: dict[str, list[pa.Table]] = {}

    def add(self, receipt: Receipt) -> None:
        """Keep what an index says of a part; its receipt is let go of soon."""
        waiting = self.waiting.setdefault(receipt.bucket, [])
        waiting.append(receipt)
        if len(waiting) == ROWS_AT_ONCE:
            self._collect(receipt.bucket)

    def tables(self) -> dict[str, pa.Table]:
        """Bucket → the rows of all its parts, by tar."""
        for bucket in self.waiting:
            self._collect(bucket)
        return {bucket: merge(self.pieces[bucket]) for bucket in sorted(self.pieces)}

    def _collect(self, bucket: str) -> None:
        rows = make_rows((receipt, "") for receipt in self.waiting[bucket])
        self.pieces.setdefault(bucket, []).append(rows)
        self.waiting[bucket] = []


def index_digest(encoding: EncodingRecord, bucket: str, rows: pa.Table) -> str:
    """SHA-256 of the index.json of a bucket with these parts."""
    digest = hashlib.sha256()
    for piece in bucket_index(encoding, bucket, rows):
        digest.update(piece)
    return digest.hexdigest()


def _write(store: Store, bucket: str, pieces: Iterable[bytes]) -> None:
    name, digest = f"{bucket}/index.json", hashlib.sha256()
    with attempt_folder(store, f"{bucket}-index") as folder:
        path = folder / "index.json"
        with path.open("wb") as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
        if store.size(name) != path.stat().st_size or store.sha256(name) != digest.hexdigest():
            store.put({name: path})
