"""Write BUCKET/index.json, the index that `streaming.StreamingDataset` reads.

It is built from receipts, never from a directory listing, and the same parts always give the same bytes.
`streaming.base.util.merge_index` cannot do this: it keeps only the last folder of a path and fails on unrelated
JSON files.
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

PLACEHOLDER = "\0"
FILES_AT_ONCE = 1 << 14
ROWS_AT_ONCE = 64
"""Receipts per bucket that `RowsByBucket` buffers before it converts them to rows."""


def write_indexes(store: Store) -> dict[str, int]:
    """Publish all committed parts and write every bucket's index.json; return bucket → number of samples."""
    manifest = Publisher(store).publish()
    write_streaming(store, manifest)
    return {bucket: size.samples for bucket, size in manifest.buckets.items()}


def write_streaming(store: Store, manifest: Manifest) -> None:
    """Write index.json for every bucket of a manifest."""
    for bucket, size in manifest.buckets.items():
        index = read_index(store, bucket, size.id)
        pieces = bucket_index(EncodingRecord.load(store), bucket, load_rows(store, size.id, index))
        _write(store, bucket, pieces)


def index_columns(encoding: EncodingRecord, bucket: str) -> list[Column]:
    """Return the columns of a bucket's MDS files in stored order."""
    types = encoding.columns(Bucket.parse(bucket))
    return [Column.of(name, types[name]) for name in sorted(types)]


def compact_json(value: Any) -> bytes:
    """Encode `value` as JSON on one line with sorted keys."""
    return (json.dumps(value, sort_keys=True, ensure_ascii=False) + "\n").encode()


def bucket_index(encoding: EncodingRecord, bucket: str, rows: pa.Table) -> Iterator[bytes]:
    """Yield ROOT/BUCKET/index.json for these parts in pieces, because the whole file can reach 600 MB."""
    # A million entries as Python objects would take gigabytes. Instead, two entries with placeholder values are dumped
    # as a template, and the values of each file are inserted between the constant pieces of text.
    config = file_config(index_columns(encoding, bucket))
    raw_data = {"basename": PLACEHOLDER, "bytes": PLACEHOLDER, "hashes": {HASH: PLACEHOLDER}}
    entry = config | {"raw_data": raw_data, "samples": PLACEHOLDER, "zip_data": None}
    files, placeholder = files_of(rows), json.dumps(PLACEHOLDER).encode()
    if not len(files):
        yield compact_json({"version": 2, "shards": []})
        return
    head, *between, tail = compact_json({"version": 2, "shards": [entry, entry]}).split(placeholder)
    separators, next_head = [head, *between[:3]], between[3]
    for batch in files.to_batches(max_chunksize=FILES_AT_ONCE):
        piece: list[bytes] = []
        for values in zip(*(batch[name].to_pylist() for name in ("name", "bytes", "hash", "samples")), strict=True):
            for separator, value in zip(separators, _json_values(*values), strict=True):
                piece += separator, value
            separators[0] = next_head
        yield b"".join(piece)
    yield tail


def _json_values(name: bytes, size: int, hash: int, samples: int) -> Iterable[bytes]:
    """Encode one file's values as JSON, in the order of the entry's sorted keys."""
    return (
        json.dumps(name.decode(), ensure_ascii=False).encode(),
        str(size).encode(),
        f'"{hash:016x}"'.encode(),
        str(samples).encode(),
    )


class RowsByBucket:
    """Collects receipts as compact tables of part rows, one table per bucket, from which indexes are built."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Receipt]] = {}
        self.pieces: dict[str, list[pa.Table]] = {}

    def add(self, receipt: Receipt) -> None:
        """Add a part. Receipts are converted to rows, and released, once `ROWS_AT_ONCE` of them are waiting."""
        waiting = self.waiting.setdefault(receipt.bucket, [])
        waiting.append(receipt)
        if len(waiting) == ROWS_AT_ONCE:
            self._collect(receipt.bucket)

    def tables(self) -> dict[str, pa.Table]:
        """Return bucket → rows of all added parts, sorted by tar."""
        for bucket in self.waiting:
            self._collect(bucket)
        return {bucket: merge(self.pieces[bucket]) for bucket in sorted(self.pieces)}

    def _collect(self, bucket: str) -> None:
        rows = make_rows((receipt, "") for receipt in self.waiting[bucket])
        self.pieces.setdefault(bucket, []).append(rows)
        self.waiting[bucket] = []


def index_digest(encoding: EncodingRecord, bucket: str, rows: pa.Table) -> str:
    """Return the SHA-256 that a bucket's index.json must have for these parts."""
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
