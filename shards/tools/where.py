"""`python -m shards where ROOT KEY`: find the tar, part, weights and settings that a sample was encoded with.

The answer comes from encoding.json, receipts and sample tables alone, so it remains available after the tars are gone.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shards.base.config import flatten
from shards.base.errors import RequestError
from shards.base.store import Store
from shards.base.table import counted
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.receipts import active_parts
from shards.format.tables import load_tables
from shards.root.committed import TarReceipts, list_commits, read_receipts


def find_sample(store: Store, key: str) -> list[dict[str, Any]]:
    """Look up the sample `key`. The result has one entry per tar that contains the key, normally exactly one. Raises
    RequestError if `store` is not a latents root or no committed tar contains the key, and DamagedFile if a table that
    was searched is missing or damaged."""
    encoding = EncodingRecord.load(store)
    names: dict[str, list[str]] = {}
    for (tar, _), name in active_parts(list_commits(store)).items():
        names.setdefault(tar, []).append(name)
    # img2dataset's keys start with the name of their tar, so first search tars whose name is a prefix of the key
    for chosen in ([tar for tar in names if key.startswith(tar)], names):
        tars = (TarReceipts(tar, {r.bucket: r for r in read_receipts(store, names[tar])}) for tar in chosen)
        if found := [entry for tar in tars if (entry := _in_tar(store, key, tar, encoding))]:
            return found
    raise RequestError(
        f"The key {key} was not found in the {counted(len(names), 'committed shard')} of {store.where()}. Check the "
        f"key, and whether its shard has been encoded."
    )


def _in_tar(store: Store, key: str, tar: TarReceipts, encoding: EncodingRecord) -> dict[str, Any] | None:
    stored, refused = {}, {}
    for bucket in sorted(tar.parts, key=Bucket.parse):
        part = tar.parts[bucket]
        samples, rejects = load_tables(store, part.folder, part.files)
        if row := _row(samples, key):
            stored[bucket] = {"folder": store.where(part.folder), "row": row[0], **row[1]}
        if row := _row(rejects, key):
            refused[bucket] = row[1]
    if not stored and not refused:
        return None
    made = ("settings", "software", "made_by", "started", "attempts", "generation")
    parts = {bucket: part.model_dump(mode="json", include=set(made)) for bucket, part in tar.parts.items()}
    return {
        "key": key,
        "shard": tar.tar,
        "tar": next(iter(tar.parts.values())).input,
        "stored": stored,
        "refused": refused,
        "encoding": {"id": encoding.id, **encoding.model_dump(mode="json")},
        "weights": {name: weights.model_dump() for name, weights in encoding.weights.items()},
        "parts": {bucket: part for bucket, part in sorted(parts.items()) if bucket in stored | refused},
    }


def _row(rows: pa.Table, key: str) -> tuple[int, dict[str, Any]] | None:
    """Find a key in a sample table; return its row number and other columns, or None if the key is not found."""
    number = pc.index(rows["key"], key).as_py()
    if number < 0:
        return None
    values = rows.slice(number, 1).to_pylist()[0]
    # missing scores are NaN in the table, which JSON cannot represent
    return number, {name: None if value != value else value for name, value in values.items() if name != "key"}


def describe_sample(entry: dict[str, Any]) -> str:
    """Format one entry from the result of `find_sample` for the terminal."""
    lines = (f"  {name.replace('_', ' '):15} {value}" for name, value in _lines(entry))
    return "\n".join([f"sample {entry['key']} of shard {entry['shard']}", *lines])


def _lines(entry: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    encoding, tar = entry["encoding"], entry["tar"]
    yield "tar", tar["address"]
    yield "", f"{tar['bytes']:,} bytes, sha256 {tar['sha256']}"
    for bucket, place in entry["stored"].items():
        columns = {name: value for name, value in place.items() if name not in ("folder", "row")}
        yield bucket, f"row {place['row']} of {place['folder']}: {_listed(columns)}"
    for bucket, row in entry["refused"].items():
        yield bucket, f"refused: {row['reason']} ({row['detail']}); from {row['url'] or 'no URL'}"
    for name, weights in entry["weights"].items():
        yield name, weights["name"]
        yield "", f"sha256 {weights['sha256']}"
    for name, value in flatten(encoding).items():
        if not name.endswith((".name", ".sha256", ".matrix", ".energy_shares")):
            yield name, _shown(value)
    for section in ("settings", "software", "made_by", "started", "attempts", "generation"):
        values = {bucket: made[section] for bucket, made in entry["parts"].items()}
        listed = {
            bucket: _listed(value) if isinstance(value, dict) else _shown(value) for bucket, value in values.items()
        }
        if len(set(listed.values())) == 1:
            yield section, next(iter(listed.values()))
        else:  # the buckets were encoded at different times
            yield from ((section, f"{bucket}: {value}") for bucket, value in listed.items())


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_shown(value)}" for key, value in values.items())


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
