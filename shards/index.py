"""BUCKET/index.json: the merged MDS index over committed parts, built from receipts and never from a listing.

`streaming.base.util.merge_index` keeps only the leaf folder's name and fails on foreign JSON files, so the index is
written here. The same receipts always give the same bytes.
"""

import json
from pathlib import Path

from shards.files import DamagedFile, canonical_json, locked, remove_torn, sha256_file, write_atomically
from shards.receipts import Receipt, load_receipts


def bucket_index(root: Path, bucket: str, receipts: list[Receipt]) -> bytes:
    """The bytes of ROOT/BUCKET/index.json over the parts that `receipts` commit to `bucket`.

    Raises:
        DamagedFile: a part's own index.json is missing or is not the one its receipt recorded.
    """
    shards = []
    for receipt in receipts:
        part = receipt.parts.get(bucket)
        if part is None or part.samples == 0:
            continue
        path = root / bucket / receipt.shard / "index.json"
        if not path.is_file() or sha256_file(path) != part.files["index.json"].sha256:
            raise DamagedFile(f"{path} is missing or is not the file that commits/{receipt.shard}.json recorded.")
        for entry in json.loads(path.read_bytes())["shards"]:
            entry["raw_data"]["basename"] = f"{receipt.shard}/{entry['raw_data']['basename']}"
            shards.append(entry)
    return canonical_json({"version": 2, "shards": shards})


def write_indexes(root: Path) -> dict[str, int]:
    """Write every bucket's index.json; returns bucket → samples in it."""
    with locked(root / ".locks" / "index.lock"):
        return _write_indexes(root, load_receipts(root))


def _write_indexes(root: Path, receipts: list[Receipt]) -> dict[str, int]:
    buckets = sorted({bucket for receipt in receipts for bucket in receipt.parts})
    for bucket in buckets:
        data = bucket_index(root, bucket, receipts)
        path = root / bucket / "index.json"
        remove_torn(path)
        if not path.is_file() or path.read_bytes() != data:
            write_atomically(path, data)
    return {b: sum(r.parts[b].samples for r in receipts if b in r.parts) for b in buckets}
