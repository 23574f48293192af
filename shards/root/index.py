"""BUCKET/index.json: the merged MDS index over committed parts, built from receipts and never from a listing.

`streaming.base.util.merge_index` keeps only the leaf folder's name and fails on foreign JSON files, so the index is
written here. The same receipts always give the same bytes.
"""

from collections.abc import Iterable

from shards.base.durable import canonical_json
from shards.base.store import Store
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.mds import HASH, Column
from shards.format.mds_writer import file_config
from shards.format.receipts import Receipt
from shards.root.committed import load_receipts


def bucket_index(encoding: EncodingRecord, bucket: str, receipts: Iterable[Receipt]) -> bytes:
    """The bytes of ROOT/BUCKET/index.json over those of `receipts` that are of `bucket`."""
    columns = encoding.stored_columns(Bucket.parse(bucket))
    config = file_config([Column.of(name, columns[name]) for name in sorted(columns)])
    shards = [
        config
        | {"samples": file.samples, "zip_data": None}
        | {"raw_data": {"basename": f"{r.part}/{file.basename}", "bytes": file.bytes, "hashes": {HASH: file.hash}}}
        for r in receipts
        if r.bucket == bucket
        for file in r.mds
    ]
    return canonical_json({"version": 2, "shards": shards})


def write_indexes(store: Store) -> dict[str, int]:
    """Write every bucket's index.json; returns bucket → samples in it."""
    receipts, samples = load_receipts(store), dict[str, int]()
    for receipt in receipts:
        samples[receipt.bucket] = samples.get(receipt.bucket, 0) + receipt.samples
    if receipts:
        encoding = EncodingRecord.load(store)
    for bucket in sorted(samples):
        data, name = bucket_index(encoding, bucket, receipts), f"{bucket}/index.json"
        if store.read_many([name]).get(name) != data:
            store.write(name, data)
    return dict(sorted(samples.items()))
