"""Exactly once: an attempt is written in private, made durable, renamed into place, and then exists by its receipt.

    ROOT/.attempts/00042.<random>/256x256/…       private; swept by the next attempt if its owner died
    ROOT/256x256/00042/…                          in place, but nobody looks before …
    ROOT/rejects/00042.parquet                    (follows from the parts' own tables, as index.json does)
    ROOT/commits/00042.json                       … the receipt says so

Two attempts at one shard may run at once, on one machine or on two: the commit itself is done under a lock, and the
one that comes second finds the receipt and throws its own work away. A committed part is never touched again: a bucket
that is added later is a further part beside it.
"""

import fcntl
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shards.encoding import FILE_NAME, EncodingRecord
from shards.errors import WorkError
from shards.files import fsync_folder, fsync_tree, locked, sha256_file
from shards.receipts import FileRecord, Part, Receipt, load_receipt
from shards.root import UNCOND_NAME
from shards.tables import REJECTS_SCHEMA, Books, read_books, write_rows

ATTEMPTS = ".attempts"
LOCKS = ".locks"
OWNER = ".owner"


@dataclass(frozen=True)
class Attempt:
    """What the receipt needs to know of an attempt besides its files."""

    shard: str
    folder: Path
    """Holds one sub-folder per bucket."""
    encoding: EncodingRecord
    samples_in: int
    counts: dict[str, tuple[int, dict[str, int]]]
    """Bucket → samples written, and refusals by reason, as `PartWriter.finish` returned them."""
    records: dict[str, dict[str, FileRecord]]
    """Bucket → the files whose size and SHA-256 are known already, as `PartWriter.records` has them."""
    source: dict[str, str | int | None]
    """The tar: its address, bytes, and SHA-256."""
    software: dict[str, str]
    settings: dict[str, str | int | float | bool]
    number: int
    started: str
    seconds: float


@contextmanager
def attempt_folder(root: Path, shard: str) -> Iterator[Path]:
    """A private folder for one attempt at `shard`; gone afterwards, however the attempt ended.

    What attempts that were killed left behind for this shard is removed first.
    """
    for abandoned in (root / ATTEMPTS).glob(f"{shard}.*"):
        with (abandoned / OWNER).open("a") as owner:
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # at work
            shutil.rmtree(abandoned, ignore_errors=True)
    folder = root / ATTEMPTS / f"{shard}.{uuid.uuid4().hex[:12]}"
    try:
        with locked(folder / OWNER):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def commit(root: Path, attempt: Attempt) -> Receipt:
    """Move an attempt's parts into place and write the receipt.

    Returns:
        The receipt now in force; another's, where others committed all of the attempt's buckets first.

    Raises:
        WorkError: the shard's other buckets were encoded from another tar.
    """
    with locked(root / LOCKS / f"{attempt.shard}.lock"):
        earlier = load_receipt(root, attempt.shard)
        fresh = [bucket for bucket in attempt.counts if earlier is None or bucket not in earlier.parts]
        if earlier is not None and not fresh:
            return earlier
        if earlier is not None and earlier.input["sha256"] != attempt.source["sha256"]:
            raise WorkError(
                f"{attempt.source['address']} is not the tar from which shard {attempt.shard} was encoded for "
                f"{', '.join(earlier.parts)}. Put that one back, or encode into a new root."
            )
        committed = {bucket: root / bucket / attempt.shard for bucket in (earlier.parts if earlier else ())}
        books = read_books(committed | {bucket: attempt.folder / bucket for bucket in fresh})
        receipt = make_receipt(root, attempt, fresh, books, earlier)
        write_rows(attempt.folder / "rejects.parquet", REJECTS_SCHEMA, list(books.rejects))
        fsync_tree(attempt.folder)
        for bucket in fresh:
            _put(attempt.folder / bucket, root / bucket / attempt.shard)
        _put(attempt.folder / "rejects.parquet", root / "rejects" / f"{attempt.shard}.parquet")
        receipt.save(root)
        return receipt


def make_receipt(root: Path, attempt: Attempt, fresh: list[str], books: Books, earlier: Receipt | None) -> Receipt:
    """The receipt of `attempt`'s `fresh` buckets and of the earlier ones; books that do not add up are refused."""
    parts = {
        bucket: Part(
            samples=attempt.counts[bucket][0],
            refused=attempt.counts[bucket][1],
            files=record_files(attempt.folder / bucket, attempt.records[bucket]),
        )
        for bucket in fresh
    }
    return Receipt(
        shard=attempt.shard,
        encoding_id=attempt.encoding.id,
        samples_in=attempt.samples_in,
        encoded=books.encoded,
        rejected=books.rejected,
        truncated_captions=books.truncated_captions,
        input=attempt.source,
        parts=(earlier.parts if earlier else {}) | parts,
        shared_files={name: record_file(root / name) for name in (UNCOND_NAME, FILE_NAME)},
        software=attempt.software,
        settings=attempt.settings,
        attempts=attempt.number,
        started=attempt.started,
        seconds=attempt.seconds,
    )


def record_files(folder: Path, known: dict[str, FileRecord]) -> dict[str, FileRecord]:
    """Size and SHA-256 of every file below `folder`, by relative path, sorted; `known` ones are not read again."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {str(path.relative_to(folder)): path for path in paths}
    return {name: known.get(name) or record_file(path) for name, path in names.items()}


def record_file(path: Path) -> FileRecord:
    """Size and SHA-256 of one file."""
    return FileRecord(bytes=path.stat().st_size, sha256=sha256_file(path))


def _put(source: Path, target: Path) -> None:
    """Rename `source` to `target`. What an attempt that died before its receipt left there is in the way, and goes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        shutil.rmtree(target)
    source.replace(target)
    fsync_folder(target.parent)
