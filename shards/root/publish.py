"""Receipts → manifests, while a job runs and at its end. Any number of processes may publish at once.

A publisher lists the commits, and fetches the receipts that the newest manifest does not know. It makes one segment of
them per bucket, merging smaller ones as it goes, so that their number grows with the logarithm of the parts'. Then it
creates the next manifest; where another was faster, it looks again. A kill leaves at most files that nobody reads.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa
from pydantic import Field

from shards.base.config import Config
from shards.base.errors import RequestError, WorkError
from shards.base.store import Store
from shards.format.receipts import active_receipts, parse_name
from shards.root.committed import list_commits, load_commits
from shards.root.manifest import BucketIndex, BucketSize, Manifest, newest_manifest, read_index
from shards.root.segments import content_id, load_segment, make_rows, merge, part_name, receipts_of, save_segment, sizes

RECEIPTS_AT_ONCE = 512
"""Held in memory before they become rows."""
LEAVE_SECONDS = 5.0
"""For so long a process that is told to leave waits for a step of its publisher; only a listing takes longer."""
MERGE_BELOW = 2
"""A segment is merged into the next one where it has fewer than this many times its parts."""


class IndexConfig(Config):
    """When what is committed becomes visible to training runs that begin."""

    every: float = Field(300.0, gt=0)
    """Seconds between two manifests while a job runs; one more is published at its end, unless it was told to leave."""


class Stopped(Exception):
    """Publishing was given up, as it was told."""


class Publisher:
    """Publishes a root, again and again; the segments of the newest manifest stay in memory."""

    def __init__(self, store: Store, stop: Callable[[], bool] = lambda: False):
        """`stop` is asked before each step, of a second or so; Stopped is raised where it says yes."""
        self.store = store
        self.stop = stop
        self.tables: dict[str, pa.Table] = {}

    def publish(self) -> Manifest:
        """The manifest of what is committed now; a new one, unless the newest says the same.

        Raises:
            DamagedFile: a receipt or a segment is not what was written.
            Stopped: `stop` said so.
        """
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
        """Store a bucket's index of the receipts `wanted`, name → etag, beginning with what is `known`."""
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
        if known and not loose and not fresh:
            return known
        return self._store(bucket, kept, merge([*loose, *self._fetch(fresh)]), repair=tables is None)

    def _load(self, bucket: str, id: str) -> dict[str, pa.Table] | None:
        """SHA-256 → table, of the segments of an index; None where a file is gone, which the receipts can make anew."""
        try:
            index = read_index(self.store, bucket, id)
            for sha256 in index.segments:
                if sha256 not in self.tables:
                    self._check()
                    self.tables[sha256] = load_segment(self.store, sha256)
        except (RequestError, FileNotFoundError):
            return None
        return {sha256: self.tables[sha256] for sha256 in index.segments}

    def _fetch(self, etags: Mapping[str, str]) -> Iterator[pa.Table]:
        names = sorted(etags)
        for first in range(0, len(names), RECEIPTS_AT_ONCE):
            self._check()
            loaded = load_commits(self.store, {name: etags[name] for name in names[first : first + RECEIPTS_AT_ONCE]})
            yield make_rows((committed.receipt, committed.etag) for committed in loaded)

    def _store(self, bucket: str, kept: list[tuple[str, pa.Table]], rows: pa.Table, repair: bool) -> BucketSize:
        """Store an index of the segments `kept` and the new `rows`, which take in those that are not much larger.

        To `repair` is to replace what may be stored under the same id, but name a segment that is gone.
        """
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
        BucketIndex(bucket=bucket, segments=tuple(segments)).save(self.store, id, repair)
        self.tables |= segments
        return BucketSize(id=id, **sizes(segments.values()))

    def _check(self) -> None:
        if self.stop():
            raise Stopped


def in_force(listed: Mapping[str, str]) -> tuple[dict[str, dict[str, str]], dict[str, tuple[str, ...]]]:
    """Bucket → receipts in force, name → etag; and bucket → names of receipts that were recalled."""
    wanted: dict[str, dict[str, str]] = {}
    recalled: dict[str, list[str]] = {}
    for name in active_receipts(listed):
        wanted.setdefault(name.split("/")[1], {})[name] = listed[name]
    for name in listed:
        if (parsed := parse_name(name)) and parsed[3]:
            bucket, tar, generation, _ = parsed
            recalled.setdefault(bucket, []).append(part_name(tar, generation))
            wanted.setdefault(bucket, {})  # of which all may be recalled
    return wanted, {bucket: tuple(sorted(names)) for bucket, names in sorted(recalled.items())}


class Publishing:
    """Publishes every so often while its body runs; and at the end where `finish` is called, not on the way out."""

    def __init__(self, store: Store, every: float):
        """`every`: seconds between two manifests."""
        self.every = every
        self.over = threading.Event()
        self.publisher = Publisher(store, self.over.is_set)
        self.thread = threading.Thread(target=self._publish, daemon=True, name="publish")

    def __enter__(self) -> "Publishing":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        # it leaves nothing half done, but a process must not end while it is in the middle of Arrow's code
        self.thread.join(LEAVE_SECONDS)

    def finish(self) -> Manifest:
        """The manifest of all that is committed.

        Raises:
            DamagedFile, RequestError: as `Publisher.publish`.
        """
        self.over.set()
        self.thread.join()
        self.publisher.stop = lambda: False
        return self.publisher.publish()

    def _publish(self) -> None:
        while not self.over.wait(self.every):
            try:
                self.publisher.publish()
            except Stopped:
                return
            except (WorkError, RequestError, OSError) as error:
                # the next one may succeed; the last one, which must, says so otherwise
                print(f"No index was published this time: {error}", file=sys.stderr, flush=True)
