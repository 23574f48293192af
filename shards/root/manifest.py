"""Numbered manifests, which map each bucket to its current index. Training runs are pinned to an index.

    ROOT/index/manifests/00000017.json      each bucket's index id, and recalled parts; the highest number is current
    ROOT/index/buckets/ID.json              an index: its list of segments. ID depends only on the set of parts
    ROOT/index/segments/SHA256.arrow        a segment: a table with one row per part

All files are written with create-if-absent and are never replaced, except to repair an index that lost a segment.
"""

import re
from collections.abc import Iterable
from typing import Any, Literal

import pyarrow as pa

from shards.base.config import Config
from shards.base.durable import DamagedFile, check_version, parse_sealed_json, sealed_json
from shards.base.errors import RequestError
from shards.base.store import Store
from shards.root.segments import content_id, load_segment, merge, names_outside, receipts_of

FOLDER = "index/manifests"
INDEXES = "index/buckets"
VERSION: Literal[2] = 2
NUMBER = re.compile(r"(\d{8})\.json")


class BucketSize(Config):
    """A bucket's index id and its totals, as listed in a manifest."""

    id: str
    parts: int
    files: int
    samples: int


class Manifest(Config):
    """The contents of a root's buckets at the time of publication."""

    version: Literal[2] = VERSION
    number: int
    buckets: dict[str, BucketSize]
    recalled: dict[str, tuple[str, ...]]
    """Bucket → names of recalled parts, as returned by `part_name`. The list only ever grows."""

    def save(self, store: Store) -> bool:
        """Publish the manifest; return False if another process has already published this number."""
        return store.create(f"{FOLDER}/{self.number:08d}.json", sealed_json(self.model_dump(mode="json")))


class BucketIndex(Config):
    """A bucket's index, stored as a list of segments. Its id determines the set of rows, but not how they are divided
    into segments."""

    version: Literal[2] = VERSION
    bucket: str
    segments: tuple[str, ...]
    """SHA-256 of each segment."""

    def save(self, store: Store, id: str, replace: bool = False) -> None:
        """Store the index under `id`, the `content_id` of its rows."""
        (store.write if replace else store.create)(index_name(id), sealed_json(self.model_dump(mode="json")))


def newest_manifest(store: Store) -> Manifest | None:
    """Load the manifest with the highest number, or return None if nothing has been published. Raises DamagedFile if it
    is damaged, and RequestError if it has a different format version."""
    numbers = [name for name in store.files(FOLDER) if NUMBER.fullmatch(name)]
    return parse_manifest(store, f"{FOLDER}/{max(numbers)}") if numbers else None


def parse_manifest(store: Store, name: str) -> Manifest:
    """Load the manifest at the path `name` relative to the root."""
    return Manifest.model_validate(_parse_version_2(store, name, store.read(name)))


def read_index(store: Store, bucket: str, id: str) -> BucketIndex:
    """Load the index `id` of a bucket. Raises RequestError if it is missing or has a different format version, and
    DamagedFile if it is damaged."""
    name = index_name(id)
    data = store.read_many([name]).get(name)
    if data is None:
        raise RequestError(
            f"{store.where()} has no index {id} for bucket {bucket}. Restore {name} from a backup, or start a new "
            f"run. If this is the root's newest index, you can also rebuild it with `python -m shards index "
            f"{store.where()}`."
        )
    return BucketIndex.model_validate(_parse_version_2(store, name, data))


def index_ids(store: Store) -> list[str]:
    """Return the ids of all indexes, of the newest and of earlier ones."""
    return [name.removesuffix(".json") for name in store.files(INDEXES) if name.endswith(".json")]


def published_receipts(store: Store, ids: Iterable[str]) -> set[str]:
    """Return the paths, relative to the root, of the receipts of all parts in these indexes. Reads each segment once.
    Raises the same errors as `read_index`, and DamagedFile if a segment is missing or damaged."""
    indexes = [read_index(store, "", id) for id in ids]
    segments = {(index.bucket, sha256) for index in indexes for sha256 in index.segments}
    try:
        return {name for bucket, sha256 in segments for name in receipts_of(load_segment(store, sha256), bucket)}
    except FileNotFoundError as error:
        raise DamagedFile(
            f"A segment of an index in {store.where()} is missing ({error}). Restore it from a backup. `verify` lists "
            f"the indexes that need it."
        ) from None


def load_rows(store: Store, id: str, index: BucketIndex) -> pa.Table:
    """Load all rows of an index. Raises DamagedFile if a segment is missing or damaged or the rows do not match `id`,
    and RequestError if a row names a path outside the bucket's folder, which suggests that the index was tampered
    with."""
    try:
        rows = merge([load_segment(store, sha256) for sha256 in index.segments])
    except FileNotFoundError as error:
        raise segment_error(store, id, f"is missing ({error})") from None
    check_rows(store, id, rows, names_outside(rows))
    return rows


def segment_error(store: Store, id: str, problem: str) -> DamagedFile:
    """Return the error for an index with a segment that has a problem, such as `is missing`."""
    return DamagedFile(
        f"A segment of {store.where(index_name(id))} {problem}. Restore the segment from a backup. If this is the "
        f"root's newest index, you can also rebuild it with `python -m shards index {store.where()}`."
    )


def check_rows(store: Store, id: str, rows: pa.Table, outside: list[str]) -> None:
    """Check the rows of an index, as `load_rows` does. `outside`: the rows' `names_outside`."""
    if outside:
        raise RequestError(
            f"{store.where(index_name(id))} names a file outside its bucket's folder: {outside[0]!r}. The index may "
            f"have been tampered with. Do not use this root."
        )
    if content_id(rows) != id:
        raise DamagedFile(
            f"{store.where(index_name(id))} is damaged: its rows do not match the id in its name. Restore it from a "
            f"backup."
        )


def current_ids(store: Store) -> dict[str, str]:
    """Return a dict from bucket to the id of its current index. It is empty if nothing has been published."""
    manifest = newest_manifest(store)
    return {bucket: size.id for bucket, size in manifest.buckets.items()} if manifest else {}


def index_name(id: str) -> str:
    """Return an index file's path relative to the root."""
    return f"{INDEXES}/{id}.json"


def _parse_version_2(store: Store, name: str, data: bytes) -> dict[str, Any]:
    try:
        fields = parse_sealed_json(data, store.where(name))
    except DamagedFile as error:
        raise DamagedFile(
            f"{error} Without a backup, delete it and run `python -m shards index {store.where()}`, which writes the "
            f"newest index again; runs that read an older index cannot be resumed."
        ) from None
    check_version(fields.get("version"), VERSION, store.where(name))
    return fields
