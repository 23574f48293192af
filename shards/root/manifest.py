"""Numbered manifests: which index each bucket has now. An index is what a run is pinned to.

    ROOT/index/manifests/00000017.json      bucket → id of its index, and what was recalled; the highest number counts
    ROOT/index/buckets/ID.json              an index: its segments. ID follows from the set of parts alone
    ROOT/index/segments/SHA256.arrow        rows of parts

All of it is created if absent, and nothing is ever replaced.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal

import pyarrow as pa

from shards.base.config import Config
from shards.base.durable import DamagedFile, check_version, parse_sealed_json, sealed_json
from shards.base.errors import RequestError
from shards.base.store import Store
from shards.root.segments import FOLDER as SEGMENTS
from shards.root.segments import content_id, load_segment, merge, names_outside

FOLDER = "index/manifests"
INDEXES = "index/buckets"
VERSION: Literal[2] = 2
NUMBER = re.compile(r"(\d{8})\.json")


class BucketSize(Config):
    """A bucket as a manifest lists it."""

    id: str
    parts: int
    files: int
    samples: int


class Manifest(Config):
    """What the root's buckets held when this was published."""

    version: Literal[2] = VERSION
    number: int
    buckets: dict[str, BucketSize]
    recalled: dict[str, tuple[str, ...]]
    """Bucket → parts that were recalled, as `part_name` has them; never fewer than before."""

    def save(self, store: Store) -> bool:
        """Whether nobody had published this number before."""
        return store.create(f"{FOLDER}/{self.number:08d}.json", sealed_json(self.model_dump(mode="json")))


class BucketIndex(Config):
    """An index: the segments that hold its rows. Which rows they hold is fixed by the id; how they are cut is not."""

    version: Literal[2] = VERSION
    bucket: str
    segments: tuple[str, ...]
    """SHA-256 of each."""

    def save(self, store: Store, id: str, replace: bool = False) -> None:
        """Under the id of its rows."""
        (store.write if replace else store.create)(index_name(id), sealed_json(self.model_dump(mode="json")))


def newest_manifest(store: Store) -> Manifest | None:
    """The highest number's; None where nothing was published.

    Raises:
        DamagedFile: it is not what was published.
        RequestError: another version of this program published it.
    """
    numbers = [name for name in store.files(FOLDER) if NUMBER.fullmatch(name)]
    if not numbers:
        return None
    name = f"{FOLDER}/{max(numbers)}"
    return Manifest.model_validate(_of_this_version(store.read(name), store.where(name)))


def read_index(store: Store, bucket: str, id: str) -> BucketIndex:
    """An index.

    Raises:
        RequestError: the root has no such index, or another version of this program published it.
        DamagedFile: it is not what was published.
    """
    name = index_name(id)
    data = store.read_many([name]).get(name)
    if data is None:
        raise RequestError(
            f"{store.where()} has no index {id} of its bucket {bucket}. Restore {name} from a copy; or, if it is "
            f"the root's newest, write it anew with `python -m shards index {store.where()}`; or start a new run."
        )
    return BucketIndex.model_validate(_of_this_version(data, store.where(name)))


def load_rows(store: Store, id: str, index: BucketIndex) -> pa.Table:
    """All rows of an index.

    Raises:
        DamagedFile: a segment is missing, or not what was stored.
        RequestError: it names a file outside its folder, so somebody forged it.
    """
    try:
        rows = merge([load_segment(store, sha256) for sha256 in index.segments])
    except FileNotFoundError as error:
        raise DamagedFile(
            f"A segment of {store.where(index_name(id))} is missing ({error}). Restore it from a copy; or, if it is "
            f"the root's newest index, write it anew with `python -m shards index {store.where()}`."
        ) from None
    if outside := names_outside(rows):
        raise RequestError(
            f"{store.where(index_name(id))} names a file outside its folder, {outside[0]!r}. Do not use this root."
        )
    if content_id(rows) != id:
        raise DamagedFile(f"{store.where(index_name(id))} names other rows than its name says. Restore it from a copy.")
    return rows


def current_ids(store: Store) -> dict[str, str]:
    """Bucket → id of its newest index; empty where nothing was published."""
    manifest = newest_manifest(store)
    return {bucket: size.id for bucket, size in manifest.buckets.items()} if manifest else {}


def damaged_indexes(store: Store) -> Iterator[str]:
    """What is wrong with what was published: of manifests, indexes and segments each that is not as it was stored."""
    for name in [f"{folder}/{file}" for folder in (FOLDER, INDEXES, SEGMENTS) for file in store.files(folder)]:
        folder, _, file = name.rpartition("/")
        data, stem = store.read(name), file.partition(".")[0]
        try:
            if folder == SEGMENTS:
                load_segment(store, stem)
            elif folder == FOLDER:
                Manifest.model_validate(_of_this_version(data, store.where(name)))
            else:
                load_rows(store, stem, BucketIndex.model_validate(_of_this_version(data, store.where(name))))
        except (DamagedFile, RequestError) as error:
            yield str(error)


def index_name(id: str) -> str:
    """Relative to the root."""
    return f"{INDEXES}/{id}.json"


def _of_this_version(data: bytes, where: str) -> dict[str, Any]:
    fields = parse_sealed_json(data, where)
    check_version(fields.get("version"), VERSION, where)
    return fields
