"""Exactly once: an attempt is written in private, made durable, renamed into place, and then exists by its receipt.

    ROOT/.attempts/00042.<random>/256x256/…       private; swept by the next attempt if its owner died
    ROOT/256x256/00042/…                          in place, but nobody looks before …
    ROOT/rejects/00042.parquet                    (follows from the parts' own tables, as index.json does)
    ROOT/commits/00042.json                       … the receipt says so

Where the root is on an object store, attempts are made in a local scratch folder, and are put instead of renamed.

Two attempts at one shard may run at once, on one machine or on two: the commit itself is done under a lock, and the
one that comes second finds the receipt and throws its own work away. A committed part is never touched again: a bucket
that is added later is a further part beside it.
"""

import fcntl
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from shards.base.durable import locked
from shards.base.errors import WorkError
from shards.base.store import LocalStore, Store
from shards.format.encoding import FILE_NAME, EncodingRecord
from shards.format.receipts import FileRecord, Part, Receipt, load_receipt
from shards.format.tables import REJECTS_SCHEMA, TABLES, Books, read_books, write_rows
from shards.root.shared import UNCOND_NAME

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
    rules: dict[str, str]
    """Bucket → which pictures it holds, as `bucket_rules` says it."""
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
def attempt_folder(store: Store, shard: str, scratch: Path | None = None) -> Iterator[Path]:
    """A private local folder for one attempt at `shard`; gone afterwards, however the attempt ended.

    What attempts that were killed left behind for this shard (on this machine, where the root is on an object store) is
    removed first. `scratch` is where such a root's attempts are made; the temporary folder if not given.
    """
    attempts = store.attempts(scratch)
    folder = attempts / f"{shard}.{uuid.uuid4().hex[:12]}"
    with ExitStack() as ours:
        with locked(_sweeper(attempts, shard)):  # nobody sweeps a folder before it is owned
            _sweep(attempts, shard)
            ours.callback(shutil.rmtree, folder, ignore_errors=True)
            ours.enter_context(locked(folder / OWNER))
        yield folder


def sweep_attempts(store: Store, scratch: Path | None = None) -> None:
    """Remove what dead attempts left behind on this machine.

    The next attempt at a shard does it for that shard; but there is none after one that was killed when it had
    committed, or when the job was told to leave.
    """
    attempts = store.attempts(scratch)
    for shard in {folder.name.rpartition(".")[0] for folder in attempts.glob("*.*")}:
        with locked(_sweeper(attempts, shard)):
            _sweep(attempts, shard)


def _sweeper(attempts: Path, shard: str) -> Path:
    return attempts.with_name(f"{attempts.name}.locks") / f"{shard}.lock"


def _sweep(attempts: Path, shard: str) -> None:
    for folder in attempts.glob(f"{shard}.*"):
        try:
            with (folder / OWNER).open("a") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            continue  # its owner has just removed it
        except BlockingIOError:
            continue  # its owner is at work


def commit(store: Store, attempt: Attempt) -> Receipt:
    """Put an attempt's parts into place and write the receipt.

    Returns:
        The receipt now in force; another's, where others committed all of the attempt's buckets first.

    Raises:
        WorkError: the shard's other buckets were encoded from another tar, or its side files counted otherwise.
    """
    with store.locked(attempt.shard) as still_held:
        earlier = load_receipt(store, attempt.shard)
        fresh = [bucket for bucket in attempt.counts if earlier is None or bucket not in earlier.parts]
        if earlier is not None and not fresh:
            return earlier
        if earlier is not None and earlier.input["sha256"] != attempt.source["sha256"]:
            raise WorkError(
                f"{attempt.source['address']} is not the tar from which shard {attempt.shard} was encoded for "
                f"{', '.join(earlier.parts)}. Put that one back, or encode into a new root."
            )
        if earlier is not None and earlier.samples_in != attempt.samples_in:
            raise WorkError(
                f"{attempt.source['address']} and the files beside it now count {attempt.samples_in} samples, but "
                f"{earlier.samples_in} when shard {attempt.shard} was encoded for {', '.join(earlier.parts)}. Put the "
                f"files that img2dataset wrote beside it back, or encode into a new root."
            )
        with ExitStack() as stack:
            committed = {
                bucket: stack.enter_context(store.local(f"{bucket}/{attempt.shard}", TABLES))
                for bucket in (earlier.parts if earlier else ())
            }
            books = read_books(committed | {bucket: attempt.folder / bucket for bucket in fresh})
        receipt = make_receipt(store, attempt, fresh, books, earlier)
        write_rows(attempt.folder / "rejects.parquet", REJECTS_SCHEMA, list(books.rejects))
        for bucket in fresh:
            store.put(attempt.folder / bucket, f"{bucket}/{attempt.shard}")
        store.put(attempt.folder / "rejects.parquet", f"rejects/{attempt.shard}.parquet")
        still_held()
        receipt.save(store)
        return receipt


def make_receipt(store: Store, attempt: Attempt, fresh: list[str], books: Books, earlier: Receipt | None) -> Receipt:
    """The receipt of `attempt`'s `fresh` buckets and of the earlier ones; books that do not add up are refused."""
    parts = {
        bucket: Part(
            samples=attempt.counts[bucket][0],
            refused=attempt.counts[bucket][1],
            rule=attempt.rules[bucket],
            files=record_files(attempt.folder / bucket, attempt.records[bucket]),
            settings=attempt.settings,
            software=attempt.software,
        )
        for bucket in fresh
    }
    # the receipt's own fields are this attempt's from now on
    kept = {b: part.model_copy(update=earlier.made_by(b)) for b, part in earlier.parts.items()} if earlier else {}
    return Receipt(
        shard=attempt.shard,
        encoding_id=attempt.encoding.id,
        samples_in=attempt.samples_in,
        encoded=books.encoded,
        rejected=books.rejected,
        captions=books.captions,
        input=attempt.source,
        parts=kept | parts,
        shared_files={name: record_file(store, name) for name in (UNCOND_NAME, FILE_NAME)},
        software=attempt.software,
        settings=attempt.settings,
        attempts=attempt.number,
        started=attempt.started,
        seconds=attempt.seconds,
    )


def record_files(folder: Path, known: dict[str, FileRecord]) -> dict[str, FileRecord]:
    """Size and SHA-256 of every file below `folder`, by relative path, sorted; `known` ones are not read again."""
    here = LocalStore(folder)
    return {name: known.get(name) or record_file(here, name) for name in here.files()}


def record_file(store: Store, name: str) -> FileRecord:
    """Size and SHA-256 of one file, which is there."""
    size = store.size(name)
    assert size is not None
    return FileRecord(bytes=size, sha256=store.sha256(name))
