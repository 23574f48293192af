"""Commit each tar's parts exactly once, without a lock: concurrent attempts are resolved by atomic creation.

    ROOT/.attempts/00042.<random>/256x256/…       the attempt's private folder; the next attempt removes it if the
                                                  owner died
    ROOT/tars/00042.json                          identity and sample count of the tar, written by the first attempt
    ROOT/256x256/00042.3fa9c1d2/…                 the part, named by its content hash; invisible to readers until …
    ROOT/commits/256x256/00042.json               … its receipt exists

Attempts with identical output share one folder, and either can complete it; attempts with different output use
different folders. Only one attempt can create the receipt. An attempt that finds a receipt reads it: the attempt's
own token in the receipt means that its create request succeeded and only the reply was lost. Committing never deletes
anything: orphaned parts stay until `python -m shards clean` removes them.

A tombstone next to a receipt recalls it. The next attempt then creates the receipt of the next generation.
"""

import hashlib
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from shards.base.durable import canonical_json, parse_sealed_json, sealed_json
from shards.base.errors import WorkError
from shards.base.store import LocalStore, Store
from shards.base.table import counted
from shards.format.encoding import FILE_NAME, EncodingRecord
from shards.format.receipts import (
    FileRecord,
    MadeBy,
    Receipt,
    pack_bits,
    parse_name,
    parse_receipt,
    receipt_name,
    tombstone_name,
)
from shards.root.shared import UNCOND_NAME
from shards.root.writing import WrittenPart


@dataclass(frozen=True)
class Attempt:
    """One attempt to encode a tar, with everything that its receipts record besides the files."""

    tar: str
    folder: Path
    """The private folder, with one sub-folder per bucket."""
    encoding: EncodingRecord
    places: dict[str, int]
    """Key → bit position in the receipt's bitmaps: the key's index among the tar's sorted keys. Only keys that appear
    in a bitmap need an entry."""
    samples_in: int
    """Number of samples in the tar."""
    parts: dict[str, WrittenPart]
    """Bucket → written part, as returned by `PartWriter.finish`."""
    rules: dict[str, str]
    """Bucket → rule that selects its images, as returned by `bucket_rules`."""
    source: dict[str, str | int | None]
    """Path or URL, size in bytes and SHA-256 of the tar."""
    software: dict[str, str]
    settings: dict[str, str | int | float | bool]
    made_by: MadeBy
    number: int
    started: str
    seconds: dict[str, float]
    """Stage → seconds, without `upload` and `total`, which `commit` adds."""
    clock: float
    """`time.monotonic()` at the start of the attempt."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def bits(self, keys: list[str]) -> str:
        """Return a packed bitmap over the tar's samples in which the bits for these keys are set."""
        values = np.zeros(self.samples_in, bool)
        values[[self.places[key] for key in keys]] = True
        return pack_bits(values)


def commit(store: Store, attempt: Attempt) -> dict[str, Receipt]:
    """Move or upload an attempt's parts into the root, and create their receipts. Return a dict from bucket to active
    receipt, which comes from a different attempt if that attempt committed the part first. Raises WorkError if the root
    already has parts of a tar of this name with different content or another sample count."""
    record_tar(store, attempt.tar, attempt.source, attempt.samples_in)
    shared = {name: record_file(store, name) for name in (UNCOND_NAME, FILE_NAME)}
    committed = {}
    for bucket, part in attempt.parts.items():
        began, folder = time.monotonic(), attempt.folder / bucket
        files = record_files(folder, part.records)
        name = f"{attempt.tar}.{content_hash(files)}"
        store_part(store, folder, f"{bucket}/{name}", files)
        now = time.monotonic()
        seconds = attempt.seconds | {"upload": now - began, "total": now - attempt.clock}
        receipt = Receipt(
            tar=attempt.tar,
            bucket=bucket,
            generation=0,
            token=attempt.token,
            encoding_id=attempt.encoding.id,
            rule=attempt.rules[bucket],
            part=name,
            files=files,
            mds=part.mds,
            samples_in=attempt.samples_in,
            samples=len(part.stored),
            stored=attempt.bits(part.stored),
            refused=part.refused,
            rejects={reason: attempt.bits(keys) for reason, keys in part.rejects.items()},
            captions=part.captions,
            licenses=part.licenses,
            input=attempt.source,
            shared_files=shared,
            software=attempt.software,
            settings=attempt.settings,
            made_by=attempt.made_by,
            attempts=attempt.number,
            started=attempt.started,
            seconds={stage: round(value, 3) for stage, value in seconds.items()},
        )
        committed[bucket] = create_receipt(store, receipt)
    return committed


def record_tar(store: Store, tar: str, source: dict[str, str | int | None], samples_in: int) -> None:
    """Create tars/TAR.json, or check that the existing one has the same SHA-256 and sample count. Raises WorkError if
    they differ."""
    name, ours = f"tars/{tar}.json", {"tar": source, "samples_in": samples_in}
    store.create(name, sealed_json(ours))
    theirs = parse_sealed_json(store.read(name), store.where(name))
    if theirs["tar"]["sha256"] != source["sha256"]:
        raise WorkError(
            f"{source['address']} is not the tar that shard {tar} was first encoded from: its SHA-256 differs from "
            f"that of {theirs['tar']['address']}, which {store.where(name)} records. Restore the original tar "
            f"(and limits.max_bytes, if it has changed), or encode into a new root."
        )
    if theirs["samples_in"] != samples_in:
        raise WorkError(
            f"{source['address']} and its sidecar files now contain {counted(samples_in, 'sample')}; they contained "
            f"{theirs['samples_in']:,} when shard {tar} was first encoded. Restore the files that img2dataset wrote "
            f"next to the tar, or encode into a new root."
        )


def content_hash(files: dict[str, FileRecord]) -> str:
    """Return the first 8 hex digits of a SHA-256 over all file names, sizes and contents."""
    return hashlib.sha256(canonical_json({name: record.model_dump() for name, record in files.items()})).hexdigest()[:8]


def store_part(store: Store, source: Path, folder: str, files: dict[str, FileRecord]) -> None:
    """Store a part's files in `folder`, which is named after their content hash.

    Existing files are hashed and kept if they are correct. The first file is always written again, so that the part
    looks recent to `clean` for as long as this attempt may still create its receipt. Raises WorkError if a file does
    not have the expected size after the upload.
    """
    if store.move(source, folder):
        return
    found = store.listing(folder)
    wrong = [
        name
        for name, record in files.items()
        if name not in found or found[name].bytes != record.bytes or store.sha256(f"{folder}/{name}") != record.sha256
    ]
    store.put({f"{folder}/{name}": source / name for name in dict.fromkeys([*wrong, min(files)])})
    if wrong:
        sizes = {name: entry.bytes for name, entry in store.listing(folder).items()}
        for name in wrong:
            if sizes.get(name) != files[name].bytes:
                raise WorkError(
                    f"{store.where(f'{folder}/{name}')} was uploaded with {sizes.get(name, 0)} bytes instead of "
                    f"{files[name].bytes}. The part was not committed. Run the job again to retry."
                )


def create_receipt(store: Store, receipt: Receipt) -> Receipt:
    """Create the receipt of a stored part, and return the active receipt: this one, or the receipt from the attempt
    that committed the part first."""
    while True:
        generation, _ = current_generation(store, receipt.bucket, receipt.tar)
        receipt = receipt.model_copy(update={"generation": generation})
        if store.create(receipt.name, receipt.sealed()):
            return receipt
        found = parse_receipt(store.read(receipt.name), store.where(receipt.name))
        if found.token == receipt.token:
            return found  # an earlier request of this attempt created it, and the reply was lost
        if store.size(tombstone_name(receipt.bucket, receipt.tar, generation)) is None:
            return found


def current_generation(store: Store, bucket: str, tar: str) -> tuple[int, Receipt | None]:
    """Return the first generation that has not been recalled, and its receipt if one exists."""
    generation = 0
    while True:
        name, tombstone = receipt_name(bucket, tar, generation), tombstone_name(bucket, tar, generation)
        found = store.read_many([name, tombstone])
        if tombstone not in found:
            return generation, parse_receipt(found[name], store.where(name)) if name in found else None
        generation += 1


def recall(store: Store, receipts: Mapping[str, str], why: str) -> None:
    """Invalidate each receipt (name → token) by creating a tombstone, so that the next job re-encodes the part.

    The part's files are kept, so that training runs that already read them can continue.
    """
    for name, token in receipts.items():
        parsed = parse_name(name)
        assert parsed is not None
        stone = {"receipt": name, "token": token, "why": why, "at": datetime.now(UTC).isoformat()}
        store.create(tombstone_name(*parsed[:3]), sealed_json(stone))


def record_files(folder: Path, known: dict[str, FileRecord]) -> dict[str, FileRecord]:
    """Return the size and SHA-256 of every file below `folder`, keyed and sorted by relative path. Files in `known` are
    not hashed again."""
    here = LocalStore(folder)
    return {name: known.get(name) or record_file(here, name) for name in here.files()}


def record_file(store: Store, name: str) -> FileRecord:
    """Return the size and SHA-256 of an existing file."""
    size = store.size(name)
    assert size is not None
    return FileRecord(bytes=size, sha256=store.sha256(name))
