"""Write BUCKET/index.json, the index that `streaming.StreamingDataset` reads.

The index is built from receipts, never from a directory listing, and the same parts always produce the same bytes.
`streaming.base.util.merge_index` cannot do this: it keeps only the last folder of a path and fails on unrelated JSON
files.
"""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from shards.base.durable import sha256_file
from shards.base.scratch import attempt_folder
from shards.base.store import Store
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.mds import HASH, Column
from shards.format.mds_writer import file_config
from shards.root.manifest import Manifest, load_rows, newest_manifest, read_index
from shards.root.publish import Publisher
from shards.root.segments import files_of

PLACEHOLDER = "\0"
FILES_AT_ONCE = 1 << 14
MAX_PASSES = 3
"""Maximum number of times that index.json is written for ever newer manifests."""


def write_indexes(store: Store) -> dict[str, int]:
    """Publish all committed parts and write every bucket's index.json. Return a dict from bucket to number of
    samples."""
    manifest = Publisher(store).publish()
    write_streaming(store, manifest)
    return {bucket: size.samples for bucket, size in manifest.buckets.items()}


def write_streaming(store: Store, manifest: Manifest) -> None:
    """Write index.json for every bucket in a manifest, except where the existing file is already up to date.

    If a newer manifest exists by then, the files are written again from it, because the process that published it may
    have written them before this one did. This stops after MAX_PASSES, since running jobs publish all the time and
    write the files themselves when they finish.
    """
    for _ in range(MAX_PASSES):
        _write_pass(store, manifest)
        newest = newest_manifest(store)
        if newest is None or newest.number <= manifest.number:
            return
        manifest = newest


def _write_pass(store: Store, manifest: Manifest) -> None:
    encoding = EncodingRecord.load(store)
    for bucket, size in manifest.buckets.items():
        name, rows = f"{bucket}/index.json", load_rows(store, size.id, read_index(store, bucket, size.id))
        with attempt_folder(store, f"{bucket}-index") as folder:
            path = folder / "index.json"
            with path.open("wb") as file:
                file.writelines(bucket_index(encoding, bucket, rows))
            if store.size(name) != path.stat().st_size or store.sha256(name) != sha256_file(path):
                store.put({name: path})


def index_columns(encoding: EncodingRecord, bucket: str) -> list[Column]:
    """Return the columns of a bucket's MDS files in stored order."""
    types = encoding.columns(Bucket.parse(bucket))
    return [Column.of(name, types[name]) for name in sorted(types)]


def bucket_index(encoding: EncodingRecord, bucket: str, rows: pa.Table) -> Iterator[bytes]:
    """Yield the content of ROOT/BUCKET/index.json for these parts in pieces, because it can reach 600 MB."""
    # all entries have the same columns, so only the values of each file are converted to JSON
    entry = file_config(index_columns(encoding, bucket)) | {"raw_data": PLACEHOLDER, "zip_data": None}
    head, tail = _json(entry).split(_json(PLACEHOLDER))
    yield b'{"shards": ['
    separator = ""
    for batch in files_of(rows).to_batches(max_chunksize=FILES_AT_ONCE):
        entries = []
        for name, size, hash, samples in zip(
            *(batch[column].to_pylist() for column in ("name", "bytes", "hash", "samples")), strict=True
        ):
            raw_data = {"basename": name.decode(), "bytes": size, "hashes": {HASH: f"{hash:016x}"}}
            entries.append(f'{head}{_json(raw_data)}, "samples": {samples}{tail}')
        yield (separator + ", ".join(entries)).encode()
        separator = ", "
    yield b'], "version": 2}\n'


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
