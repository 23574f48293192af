"""Publish manifests from receipts, while a job runs and when it finishes. Several processes may publish concurrently.

A publisher lists the commits and fetches only the receipts that the newest manifest does not cover. It writes them as
one new segment per bucket and merges small segments into it, so the number of segments grows with the logarithm of the
number of parts. Then it creates the next manifest, and starts over if another process created it first. A killed
publisher leaves behind at most a few unreferenced files.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa
from pydantic import Field

from shards.base.config import Config
from shards.base.errors import RequestError, WorkError
from shards.base.store import Store
from shards.format.receipts import active_receipts, parse_name, parse_receipt
from shards.root.committed import list_commits
from shards.root.manifest import BucketIndex, BucketSize, Manifest, newest_manifest, read_index
from shards.root.segments import content_id, load_segment, make_rows, merge, part_name, receipts_of, save_segment, sizes

RECEIPTS_AT_ONCE = 512
"""Number of receipts that are read at once and converted to rows."""
JOIN_TIMEOUT_SECONDS = 5.0
"""Maximum time that a stopping process waits for its publisher's current step. Only a listing can take longer."""
MERGE_BELOW = 2
"""A new segment absorbs every existing segment that has fewer than MERGE_BELOW times as many rows as the new
segment."""


class IndexConfig(Config):
    """Publication of committed parts during a job, so that new training runs see them."""

    every: float = Field(300.0, gt=0)
    """Seconds between manifests while a job runs. A final manifest is published when the job finishes, unless it was
    stopped."""


class PublishStopped(Exception):
    """Exception that ends publishing because the process is stopping."""


class Publisher:
    """Publisher of a root's committed parts, which caches the segments of the newest manifest in memory between
    calls."""

    def __init__(self, store: Store, stop: Callable[[], bool] = lambda: False):
        """Prepare a publisher. `stop` is polled before each step (about a second of work); PublishStopped is raised
        once it returns True."""
        self.store = store
        self.stop = stop
        self.tables: dict[str, pa.Table] = {}

    def publish(self) -> Manifest:
        """Publish all committed parts, unless the newest manifest already lists them. Return the current manifest.
        Raises DamagedFile if a receipt or a segment is damaged, and PublishStopped if `stop` returned True."""
        while True:
            newest, listed = newest_manifest(self.store), list_commits(self.store)
            wanted, recalled = in_force(listed)
            known = newest.buckets if newest else {}
            buckets = {name: self._extend(name, known.get(name), wanted[name]) for name in sorted(wanted)}
            if newest and (newest.buckets, newest.recalled) == (buckets, recalled):
                return newest
            manifest = Manifest(number=newest.number + 1 if newest else 1, buckets=buckets, recalled=recalled)
            if manifest.save(self.store):
                return manifest

    def _extend(self, bucket: str, known: BucketSize | None, wanted: Mapping[str, str]) -> BucketSize:
        """Store the index for a bucket's `wanted` receipts (name → ETag), reusing segments of the `known` index."""
        kept, loose, fresh = [], [], dict(wanted)
        tables = self._load(bucket, known.id) if known else {}
        for sha256, table in (tables or {}).items():
            named = list(zip(receipts_of(table, bucket), table["etag"].to_pylist(), strict=True))
            current = [wanted.get(name) == etag for name, etag in named]
            for (name, _), is_current in zip(named, current, strict=True):
                if is_current:
                    del fresh[name]
            if all(current):
                kept.append((sha256, table))
            else:
                loose.append(self.tables.pop(sha256).filter(pa.array(current)))
        if known and tables is not None and not loose and not fresh:
            return known
        rows = merge([*loose, *read_rows(self.store, fresh, self._check)])
        kept.sort(key=lambda segment: len(segment[1]), reverse=True)
        while kept and len(kept[-1][1]) < MERGE_BELOW * len(rows):
            sha256, smaller = kept.pop()
            rows = merge([smaller, rows])
            del self.tables[sha256]
        self._check()
        segments = dict(kept)
        if len(rows) or not kept:
            segments[save_segment(self.store, rows)] = rows
        id = content_id(merge(list(segments.values()), ["tar", "generation", "digest"]))
        # the rebuilt index has the same id as the one that lost a segment, so it must replace that one
        BucketIndex(bucket=bucket, segments=tuple(segments)).save(self.store, id, replace=tables is None)
        self.tables |= segments
        return BucketSize(id=id, **sizes(segments.values()))

    def _load(self, bucket: str, id: str) -> dict[str, pa.Table] | None:
        """Load an index's segments by SHA-256. Return None if a file is missing, because the index can be rebuilt from
        receipts."""
        try:
            index = read_index(self.store, bucket, id)
            for sha256 in index.segments:
                if sha256 not in self.tables:
                    self._check()
                    self.tables[sha256] = load_segment(self.store, sha256)
        except (RequestError, FileNotFoundError):
            return None
        return {sha256: self.tables[sha256] for sha256 in index.segments}

    def _check(self) -> None:
        if self.stop():
            raise PublishStopped


def read_rows(store: Store, etags: Mapping[str, str], check: Callable[[], None] = lambda: None) -> Iterator[pa.Table]:
    """Yield the rows of these receipts (name → ETag) in blocks, and call `check` before each block."""
    names = sorted(etags)
    for first in range(0, len(names), RECEIPTS_AT_ONCE):
        check()
        found = store.read_many(names[first : first + RECEIPTS_AT_ONCE])
        yield make_rows((parse_receipt(data, store.where(name)), etags[name]) for name, data in found.items())


def in_force(listed: Mapping[str, str]) -> tuple[dict[str, dict[str, str]], dict[str, tuple[str, ...]]]:
    """Split a listing of commits/ by bucket. Return a dict from bucket to its active receipts (name → ETag), and a dict
    from bucket to the sorted names of its recalled parts."""
    wanted: dict[str, dict[str, str]] = {}
    recalled: dict[str, list[str]] = {}
    for name in active_receipts(listed):
        wanted.setdefault(name.split("/")[1], {})[name] = listed[name]
    for name in listed:
        if (parsed := parse_name(name)) and parsed[3]:
            bucket, tar, generation, _ = parsed
            recalled.setdefault(bucket, []).append(part_name(tar, generation))
            wanted.setdefault(bucket, {})  # all parts of the bucket may have been recalled
    return wanted, {bucket: tuple(sorted(names)) for bucket, names in sorted(recalled.items())}


class PeriodicPublisher:
    """Context manager that publishes at intervals from a background thread.

    The last manifest is published by `finish`, not on exit, so nothing more is published if the `with` block raises.
    """

    def __init__(self, store: Store, every: float):
        """Prepare to publish a manifest every `every` seconds."""
        self.every = every
        self.over = threading.Event()
        self.publisher = Publisher(store, self.over.is_set)
        self.thread = threading.Thread(target=self._publish, daemon=True, name="publish")

    def __enter__(self) -> "PeriodicPublisher":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        # abandoning a step is harmless, but the process must not exit while the thread is inside Arrow's native code
        self.thread.join(JOIN_TIMEOUT_SECONDS)

    def finish(self) -> Manifest:
        """Stop the thread, publish all committed parts, and return the manifest. Raises the same errors as
        `Publisher.publish`."""
        self.over.set()
        self.thread.join()
        self.publisher.stop = lambda: False
        return self.publisher.publish()

    def _publish(self) -> None:
        while not self.over.wait(self.every):
            try:
                self.publisher.publish()
            except PublishStopped:
                return
            except (WorkError, RequestError, OSError) as error:
                # a later attempt may succeed, and `finish` raises if the last one fails
                print(f"Publishing the index failed and will be retried: {error}", file=sys.stderr, flush=True)
