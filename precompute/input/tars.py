"""Webdataset tars: listing them, reading their samples, and verifying that they are complete.

The tar format cannot distinguish a truncated archive from a short one: at a header that is corrupt or cut off, the
listing ends without an error. Therefore, all headers are read first (`layout.py`), and the samples must match those
listed in img2dataset's sidecar files, `NNNNN_stats.json` and `NNNNN.parquet`. A damaged tar is refused by default;
under `salvage`, its intact samples are used and every lost sample is accounted for.
"""

import io
import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from precompute.input.layout import REPLACE, Member, compression_of, read_layout
from precompute.input.listing import Listing
from precompute.input.numbering import Found
from precompute.input.numbering import Member as FoundMember
from precompute.input.parquet import CONCURRENT_FOOTERS, StoreFile
from precompute.input.unit import (
    CAPTION_SUFFIXES,
    IMAGE_SUFFIXES,
    MAX_JSON_BYTES,
    SAMPLE_SUFFIXES,
    InputRecord,
    Policy,
    RawSample,
    Unit,
    parse_json,
)
from shards.base.durable import sha256_file
from shards.base.errors import DamagedInput, Outage, RequestError
from shards.base.store import LocalStore, Store
from shards.base.table import counted

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst")
HEAD_BYTES = 16 << 20
"""Bytes of a tar that are read to inspect its fields."""
SUCCESS = "success"
"""Status of downloaded images in img2dataset's files."""
MAX_LISTED = 5
"""Maximum number of damage descriptions listed in a receipt."""
MAX_ROWS = 1_000_000
"""Maximum number of rows in the parquet sidecar file, because a few bytes can decode to any number of rows."""
SIDECAR_COLUMNS = {"key", "status"}
"""Columns that distinguish img2dataset's parquet file from other files with the tar's name."""
MAX_COUNTED = 1000
"""Maximum number of tars whose stats files are read to report the number of samples."""
BLOCK_BYTES, MAX_RATIO = 1 << 16, 100
"""Bytes per decompressed block, which is lost as a whole if it is damaged, and maximum compression ratio."""


@dataclass(frozen=True)
class TarUnit(Unit):
    """A tar in a folder or at any URL."""

    store: Store
    file: str
    """Name of the tar in the store."""

    @contextmanager
    def open(self, max_bytes: int, policy: Policy = "reject") -> Iterator["Tar"]:
        with local_copy(self.store, self.file) as copy, decompressed(copy, self.address, policy) as path:
            tar = Tar(path, max_bytes, policy, self.address)
            tar.check(self.store, self.name)
            # in a separate thread, because in a decoding thread the hash could delay an image beyond its time limit
            with ThreadPoolExecutor(1) as hasher:
                tar.start_hash(hasher)
                yield tar

    def head(self, max_bytes: int) -> Iterator[RawSample]:
        for num_bytes in (HEAD_BYTES, HEAD_BYTES + max_bytes):  # the first image may be large
            with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
                copy = Path(folder) / "head.tar"
                copy.write_bytes(self.store.read_range(self.file, 0, num_bytes))
                is_empty = True
                with decompressed(copy, self.address, "salvage") as start:
                    for sample in Tar(start, max_bytes, "salvage", self.address).samples():
                        if not sample.lost:
                            is_empty = False
                            yield sample
            if not is_empty:
                return


def find_tars(listing: Listing) -> Found | None:
    """Find the tars directly in a folder, or the single tar. Raises RequestError if two tars have the same name."""
    names: dict[str, str] = {}
    for name in listing.files:
        suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)
        if suffix and "/" not in name and names.setdefault(stem := name.removesuffix(suffix), name) != name:
            raise RequestError(
                f"{listing.address} contains the tar {stem} twice, as {names[stem]} and {name}. Keep one."
            )
    listing = _with_sidecars(listing, names)
    stats = [file for stem in names if (file := f"{stem}_stats.json") in listing.files]
    members = [FoundMember(stem, listing.files[name], 0) for stem, name in names.items()]
    if len(stats) == len(names) <= MAX_COUNTED:
        counts = listing.store.read_many(stats)
        members = [FoundMember(stem, size, _successes(counts.get(f"{stem}_stats.json"))) for stem, size, _ in members]

    def make(name: str, members: tuple[FoundMember, ...]) -> TarUnit:
        return TarUnit(name, listing.store.where(names[name]), listing.store, names[name])

    notes = tuple(_notes(listing, names))
    return Found("webdataset tars", listing, members, make, is_numbered=False, notes=notes) if members else None


def _with_sidecars(listing: Listing, names: dict[str, str]) -> Listing:
    """If the input is a single tar, add img2dataset's files that are next to it, as in the listing of a folder."""
    if not listing.only:
        return listing
    sidecars = [f"{stem}{suffix}" for stem in names for suffix in ("_stats.json", ".parquet")]
    sizes = {name: size for name in sidecars if (size := listing.store.size(name)) is not None}
    return replace(listing, files=listing.files | sizes)


def _notes(listing: Listing, names: dict[str, str]) -> Iterator[str]:
    """Yield notes for the user about the tars (name → file) in a folder."""
    unproven = [stem for stem in names if f"{stem}_stats.json" not in listing.files]
    is_cheap = len(unproven) <= MAX_COUNTED  # otherwise, every parquet file counts as img2dataset's
    with ThreadPoolExecutor(CONCURRENT_FOOTERS) as pool:
        has_parquet = _has_sidecar if is_cheap else lambda listing, stem: f"{stem}.parquet" in listing.files
        found = pool.map(lambda stem: has_parquet(listing, stem), unproven)
    unverifiable = [stem for stem, has in zip(unproven, found, strict=True) if not has]
    if unverifiable:
        yield (
            f"{len(unverifiable)} of {len(names)} tars have no NNNNN_stats.json or NNNNN.parquet from img2dataset, "
            f"which writes them next to each tar. Corrupt and truncated tars are still detected, but whole samples "
            f"that are missing from a tar are not."
        )
    if packed := [name for name in names.values() if not name.endswith(".tar")]:
        yield (
            f"{len(packed)} of {len(names)} tars are compressed. Each attempt decompresses the whole tar into scratch "
            f"space first, although compression hardly shrinks images. To encode them more than once, decompress them."
        )


def _has_sidecar(listing: Listing, stem: str) -> bool:
    """Return whether img2dataset's parquet file is next to a tar. A damaged one counts; the worker will report it."""
    name = f"{stem}.parquet"
    if name not in listing.files:
        return False
    try:
        with pq.ParquetFile(StoreFile(listing.store, name, listing.files[name])) as parquet:
            return set(parquet.schema_arrow.names) >= SIDECAR_COLUMNS
    except (pa.ArrowException, OSError):
        return True


def _successes(stats: bytes | None) -> int:
    """Return the number of samples in a stats file, or 0 if it is unreadable, which the worker will report."""
    with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return int(json.loads(stats or b"{}")["successes"])
    return 0


@contextmanager
def local_copy(store: Store, file: str) -> Iterator[Path]:
    """Provide a file as a local path: the file itself if it is local, or else a temporary copy. Raises Outage if it
    cannot be downloaded, and FileNotFoundError if it does not exist."""
    if isinstance(store, LocalStore):
        yield store.root / file
        return
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        target = Path(folder) / "copy.tar"
        store.get(file, target)
        size = store.size(file)
        if target.stat().st_size != size:
            raise Outage(f"{store.where(file)} was downloaded incompletely: {target.stat().st_size} of {size} bytes.")
        yield target


@contextmanager
def decompressed(path: Path, address: str, policy: Policy) -> Iterator[Path]:
    """Provide the tar at `path` without compression: the file itself, or a temporary copy. Raises DamagedInput if it
    cannot be decompressed; under `salvage`, the copy is truncated at that point."""
    algorithm = compression_of(path, address)
    if algorithm is None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        target, left = Path(folder) / "copy.tar", MAX_RATIO * path.stat().st_size
        try:
            with pa.CompressedInputStream(pa.OSFile(str(path)), algorithm) as stream, target.open("wb") as file:
                while data := stream.read(BLOCK_BYTES):
                    left -= file.write(data)
                    if left < 0:
                        raise ValueError(f"it is more than {MAX_RATIO} times as large as its compressed file")
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            if policy == "reject":
                raise DamagedInput(f"{address} cannot be decompressed: {error}. {REPLACE}") from error
        yield target


@dataclass(frozen=True)
class Counted:
    """The samples that a tar should contain, according to img2dataset's sidecar files."""

    counts: dict[str, int]
    """Name of each existing sidecar file → number of samples that it lists."""
    urls: dict[str, str] | None
    """Key → URL of each sample; None if there is no parquet file."""


class Tar:
    """A local tar, whose headers have been read.

    Raises:
        DamagedInput: The tar is truncated, damaged or ambiguous, unless the policy is `salvage`.
    """

    def __init__(self, path: Path, max_member_bytes: int, policy: Policy = "reject", address: str = ""):
        self.path = path
        self.address = address or str(path)
        self.max_member_bytes = max_member_bytes
        self.bytes = path.stat().st_size
        layout = read_layout(path, self.address)
        if layout.damage and policy == "reject":
            damage, remedy = next(iter(layout.damage.items()))
            raise DamagedInput(f"{self.address} {damage}. {remedy}")
        self.policy = policy
        self.damage = layout.damage
        self.members = {key: members for key, members in layout.members.items() if key not in layout.lost}
        self.lost = {key: RawSample(key, lost=why) for key, why in layout.lost.items()}
        self.num_unnamed = 0
        self._hash: Future[str] | None = None

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the whole file, without compression."""
        return sha256_file(self.path) if self._hash is None else self._hash.result()

    def start_hash(self, hasher: ThreadPoolExecutor) -> None:
        """Compute `sha256` in another thread."""
        self._hash = hasher.submit(sha256_file, self.path)

    def check(self, store: Store, name: str) -> None:
        """Check the samples against img2dataset's sidecar files of the tar `name` in `store`, if there are any. Under
        `salvage`, record the missing ones as lost.

        Raises:
            DamagedInput: A sidecar file cannot be parsed. Under `reject`, the samples differ from those listed, so the
                tar lost or gained samples after it was written. Under `salvage`, the tar is damaged and has no intact
                samples left.
        """
        expected = counted_samples(store, name)
        listed = expected.urls if expected.urls is not None else dict.fromkeys(self.members | self.lost, "")
        missing = listed.keys() - self.members.keys()
        foreign = self.members.keys() - listed.keys()
        found = len(self.members)
        wrong = [
            f"contains {counted(found, 'sample')}, but {file} lists {count}"
            for file, count in expected.counts.items()
            if count != found
        ]
        if foreign:
            wrong.append(
                f"contains {counted(len(foreign), 'sample')} that its parquet file does "
                f"not list, starting with {min(foreign)}"
            )
        if wrong and self.policy == "reject":
            raise DamagedInput(
                f"{self.address} {wrong[0]}. One of these files has been replaced or damaged since img2dataset wrote "
                f"them. Download the tar again."
            )
        self.damage |= dict.fromkeys(wrong, REPLACE)
        self.members = {key: members for key, members in self.members.items() if key in listed}
        reasons = {key: self.lost[key].lost if key in self.lost else "it is not in the tar" for key in sorted(missing)}
        self.lost = {key: RawSample(key, metadata={"url": listed[key]}, lost=why) for key, why in reasons.items()}
        num_known = len(self.members) + len(self.lost)
        self.num_unnamed = max([num_known, *expected.counts.values()]) - num_known
        if self.damage and not self.members:
            damage, remedy = next(iter(self.damage.items()))
            raise DamagedInput(f"{self.address} {damage}, and no intact sample is left. {remedy}")

    def samples(self) -> Iterator[RawSample]:
        """Yield the intact samples in the order of their first members, and then the lost samples, sorted by key."""
        with self.path.open("rb") as file:
            for key, members in self.members.items():
                sample = RawSample(key)
                for suffix, member in members.items():
                    self._add(sample, suffix, file.fileno(), member)
                yield sample
        yield from self.lost.values()

    def record(self) -> InputRecord:
        """Describe the tar for receipts. For a damaged tar, `lost` counts the samples that are rejected as
        `lost_in_tar`, and `lost_unnamed` counts additional lost samples, whose keys are unknown."""
        record: InputRecord = {"address": self.address, "bytes": self.bytes, "sha256": self.sha256}
        if self.damage:
            damage = "; ".join(list(self.damage)[:MAX_LISTED]) + ("; …" if len(self.damage) > MAX_LISTED else "")
            record |= {"damage": damage, "lost": len(self.lost), "lost_unnamed": self.num_unnamed}
        return record

    def _add(self, sample: RawSample, suffix: str, file: int, member: Member) -> None:
        if suffix not in SAMPLE_SUFFIXES:
            return
        if member.size > self.max_member_bytes:
            sample.oversized = f"the member {member.name} has {member.size} bytes, more than {self.max_member_bytes}"
            return
        if suffix == "json" and member.size > MAX_JSON_BYTES:
            return
        data = os.pread(file, member.size, member.offset)
        if len(data) != member.size:
            raise DamagedInput(
                f"{self.path} changed while it was being read: the member {member.name!r} is truncated. Run "
                f"the job again once the tar is complete."
            )
        if suffix in IMAGE_SUFFIXES:
            sample.image = data
        elif suffix == "txt" or (suffix in CAPTION_SUFFIXES and sample.caption is None):
            sample.caption = data
        elif suffix == "json":
            sample.metadata = parse_json(data)


def counted_samples(store: Store, name: str) -> Counted:
    """Read img2dataset's sidecar files of a tar, `NNNNN_stats.json` and `NNNNN.parquet`, if they exist. Raises
    DamagedInput if one of them cannot be parsed."""
    stats, parquet, found = f"{name}_stats.json", f"{name}.parquet", dict[str, bytes]()
    for file in (stats, parquet):
        with suppress(FileNotFoundError):
            found[file] = store.read(file)
    counts: dict[str, int] = {}
    urls: dict[str, str] | None = None
    if stats in found:
        with damaged(store.where(stats)):
            counts[stats] = int(json.loads(found[stats])["successes"])
    if parquet in found:
        with damaged(store.where(parquet)):
            rows = successes(found[parquet])
            if rows is not None:
                urls = {str(row["key"]): row.get("url") or "" for row in rows}
                counts[parquet] = len(rows)
    return Counted(counts, urls)


@contextmanager
def damaged(name: str) -> Iterator[None]:
    """Convert any exception raised while parsing a sidecar file's bytes, including OSError, to DamagedInput."""
    try:
        yield
    except (ValueError, KeyError, TypeError, OSError, OverflowError, RecursionError, pa.ArrowException) as error:
        raise DamagedInput(f"{name} is damaged ({type(error).__name__}: {error}). {REPLACE}") from error


def successes(data: bytes) -> list[dict[str, Any]] | None:
    """Return the successful rows of img2dataset's parquet file, with the columns `key`, `status` and, if present,
    `url`, or None if the file is not from img2dataset. Raises ValueError if it has more than MAX_ROWS rows."""
    table = pq.ParquetFile(io.BytesIO(data))
    if not set(table.schema_arrow.names) >= SIDECAR_COLUMNS:
        return None
    if table.metadata.num_rows > MAX_ROWS:
        raise ValueError(f"it has {table.metadata.num_rows} rows, more than the limit of {MAX_ROWS}")
    columns = [column for column in ("key", "url", "status") if column in table.schema_arrow.names]
    return [row for row in table.read(columns).to_pylist() if row["status"] == SUCCESS]
