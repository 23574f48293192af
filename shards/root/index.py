"""BUCKET/index.json: the merged MDS index over committed parts, built from receipts and never from a listing.

`streaming.base.util.merge_index` keeps only the leaf folder's name and fails on foreign JSON files, so the index is
written here. The same receipts always give the same bytes.
"""

import hashlib
import json

from shards.base.durable import DamagedFile, canonical_json
from shards.base.store import Store
from shards.format.receipts import Receipt, load_receipts


def bucket_index(store: Store, bucket: str, receipts: list[Receipt]) -> bytes:
    """The bytes of ROOT/BUCKET/index.json over the parts that `receipts` commit to `bucket`.

    Raises:
        DamagedFile: a part's own index.json is missing or is not the one its receipt recorded.
    """
    parts = {f"{bucket}/{r.shard}/index.json": r for r in receipts if bucket in r.parts and r.parts[bucket].samples}
    found = store.read_many(list(parts))
    shards = []
    for name, receipt in parts.items():
        data = found.get(name)
        if data is None or hashlib.sha256(data).hexdigest() != receipt.parts[bucket].files["index.json"].sha256:
            raise DamagedFile(
                f"{store.where(name)} is missing or is not the file that commits/{receipt.shard}.json recorded."
            )
        for entry in json.loads(data)["shards"]:
            entry["raw_data"]["basename"] = f"{receipt.shard}/{entry['raw_data']['basename']}"
            shards.append(entry)
    return canonical_json({"version": 2, "shards": shards})


def write_indexes(store: Store) -> dict[str, int]:
    """Write every bucket's index.json; returns bucket → samples in it."""
    with store.locked("index") as still_held:
        receipts = load_receipts(store)
        buckets = sorted({bucket for receipt in receipts for bucket in receipt.parts})
        for bucket in buckets:
            data, name = bucket_index(store, bucket, receipts), f"{bucket}/index.json"
            if store.read_many([name]).get(name) != data:
                still_held()
                store.write(name, data)
    return {b: sum(r.parts[b].samples for r in receipts if b in r.parts) for b in buckets}
