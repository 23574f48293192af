"""Exactly once, without a lock: attempts meet in names that only one of them can create.

    ROOT/.attempts/00042.<random>/256x256/…       private; swept by the next attempt if its owner died
    ROOT/tars/00042.json                          which tar it is, and how many samples it has: the first one's word
    ROOT/256x256/00042.3fa9c1d2/…                 in place, named by its content; but nobody looks before …
    ROOT/commits/256x256/00042.json               … the receipt says so

Equal attempts meet in one folder, which either may complete; different ones have folders of their own. Of the receipts,
one is created. Who is told that there is one reads it: with its own token in it, the reply to the first request was
lost, and it has won after all. Nobody deletes: parts that no receipt names stay until `python -m shards clean`.

A receipt is recalled by a tombstone beside it; the next attempt creates that of the next generation.
"""

import hashlib
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import numpy as np

from shards.base.durable import canonical_json, parse_sealed_json, sealed_json
from shards.base.errors import WorkError
from shards.base.store import LocalStore, Store
from shards.format.encoding import FILE_NAME, EncodingRecord
from shards.format.receipts import (
    FileRecord,
    MadeBy,
    Receipt,
    pack_bits,
    parse_receipt,
    receipt_name,
    tombstone_name,
)
from shards.root.shared import UNCOND_NAME
from shards.root.writing import WrittenPart


@dataclass(frozen=True)
class Attempt:
    """What receipts need to know of an attempt besides its files."""

    tar: str
    folder: Path
    """Holds one sub-folder per bucket."""
    encoding: EncodingRecord
    places: dict[str, int]
    """Key → its bit, which is its place among the tar's sorted keys; of samples that a receipt tells apart."""
    samples_in: int
    """All of the tar's samples."""
    parts: dict[str, WrittenPart]
    """By bucket, as `PartWriter.finish` returned them."""
    rules: dict[str, str]
    """Bucket → which pictures it holds, as `bucket_rules` says it."""
    source: dict[str, str | int | None]
    """The tar: its address, bytes, and SHA-256."""
    software: dict[str, str]
    settings: dict[str, str | int | float | bool]
    made_by: MadeBy
    number: int
    started: str
    seconds: dict[str, float]
    """Per stage, without `upload` and `total`."""
    clock: float
    """`time.monotonic` when it began."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def bits(self, keys: list[str]) -> str:
        """Those of the tar's samples that have these keys."""
        values = np.zeros(self.samples_in, bool)
        values[[self.places[key] for key in keys]] = True
        return pack_bits(values)


def commit(store: Store, attempt: Attempt) -> dict[str, Receipt]:
    """Put an attempt's parts into place, and create their receipts.

    Returns:
        Bucket → the receipt now in force; another's, where another committed that part first.

    Raises:
        WorkError: the tar's other parts were encoded from another tar, or its side files counted otherwise.
    """
    record_tar(store, attempt.tar, attempt.source, attempt.samples_in)
    shared = {name: record_file(store, name) for name in (UNCOND_NAME, FILE_NAME)}
    committed = {}
    for bucket, part in attempt.parts.items():
        began, folder = time.monotonic(), attempt.folder / bucket
        files = record_files(folder, part.records)
        name = f"{attempt.tar}.{content_hash(files)}"
        place(store, folder, f"{bucket}/{name}", files)
        now = time.monotonic()
        times = {"upload": now - began, "total": now - attempt.clock}
        receipt = make_receipt(attempt, bucket, name, files, shared, times)
        committed[bucket] = create_receipt(store, receipt)
    return committed


def record_tar(store: Store, tar: str, source: dict[str, str | int | None], samples_in: int) -> None:
    """Create tars/TAR.json, or hold the one that is there against this.

    Raises:
        WorkError: they are of different tars.
    """
    name, ours = f"tars/{tar}.json", {"tar": source, "samples_in": samples_in}
    store.create(name, sealed_json(ours))
    theirs = parse_sealed_json(store.read(name), store.where(name))
    if theirs["tar"]["sha256"] != source["sha256"]:
        raise WorkError(
            f"{source['address']} is not the tar from which shard {tar} was encoded before, "
            f"{theirs['tar']['address']} ({store.where(name)}). Put that one back, or encode into a new root."
        )
    if theirs["samples_in"] != samples_in:
        raise WorkError(
            f"{source['address']} and the files beside it now count {samples_in} samples, but {theirs['samples_in']} "
            f"when shard {tar} was encoded before. Put the files that img2dataset wrote beside it back, or encode into "
            f"a new root."
        )


def content_hash(files: dict[str, FileRecord]) -> str:
    """8 hex digits of all names, sizes and contents."""
    return hashlib.sha256(canonical_json({name: record.model_dump() for name, record in files.items()})).hexdigest()[:8]


def place(store: Store, source: Path, folder: str, files: dict[str, FileRecord]) -> None:
    """Put a part's files into `folder`, whose name is their content's hash.

    What lies there already is hashed, and used where it is right. The first file is written in any case: as long as an
    attempt may come to its receipt, its part is not old, and `clean` leaves it alone.

    Raises:
        WorkError: what then lies there has not the size of what was put.
    """
    if store.move(source, folder):
        return
    wrong = [name for name, right in _compare(store, folder, files).items() if not right]
    store.put({f"{folder}/{name}": source / name for name in dict.fromkeys([*wrong, min(files)])})
    if wrong:
        sizes = {name: entry.bytes for name, entry in store.listing(folder).items()}
        for name in wrong:
            if sizes.get(name) != files[name].bytes:
                raise WorkError(
                    f"{store.where(f'{folder}/{name}')} has {sizes.get(name)} bytes of {files[name].bytes}."
                )


def _compare(store: Store, folder: str, files: dict[str, FileRecord]) -> dict[str, bool]:
    """File → whether what lies in `folder` is that."""
    found = store.listing(folder)
    return {
        name: name in found and found[name].bytes == record.bytes and store.sha256(f"{folder}/{name}") == record.sha256
        for name, record in files.items()
    }


def create_receipt(store: Store, receipt: Receipt) -> Receipt:
    """Create the receipt of a part that is in place, and return it; or another's, where that is in force."""
    while True:
        generation, _ = current(store, receipt.bucket, receipt.tar)
        receipt = receipt.model_copy(update={"generation": generation})
        if store.create(receipt.name, receipt.sealed()):
            return receipt
        found = parse_receipt(store.read(receipt.name), store.where(receipt.name))
        if found.token == receipt.token:
            return found  # created by this attempt, which was not told
        if store.size(tombstone_name(receipt.bucket, receipt.tar, generation)) is None:
            return found


def current(store: Store, bucket: str, tar: str) -> tuple[int, Receipt | None]:
    """The generation that is not recalled, and its receipt if there is one."""
    generation = 0
    while True:
        name, tombstone = receipt_name(bucket, tar, generation), tombstone_name(bucket, tar, generation)
        found = store.read_many([name, tombstone])
        if tombstone not in found:
            return generation, parse_receipt(found[name], store.where(name)) if name in found else None
        generation += 1


class Recallable(Protocol):
    """The fields of a receipt that a recall needs."""

    @property
    def name(self) -> str: ...
    @property
    def token(self) -> str: ...
    @property
    def tar(self) -> str: ...
    @property
    def bucket(self) -> str: ...
    @property
    def generation(self) -> int: ...


def recall(store: Store, receipts: Iterable[Recallable], why: str) -> None:
    """Put a tombstone beside each receipt: it is no longer in force, and the next job makes its part anew.

    Parts stay where they are, so that a run that has begun with them goes on.
    """
    for receipt in receipts:
        stone = {"receipt": receipt.name, "token": receipt.token, "why": why, "at": datetime.now(UTC).isoformat()}
        store.create(tombstone_name(receipt.bucket, receipt.tar, receipt.generation), sealed_json(stone))


def make_receipt(
    attempt: Attempt,
    bucket: str,
    name: str,
    files: dict[str, FileRecord],
    shared: dict[str, FileRecord],
    times: dict[str, float],
) -> Receipt:
    """The receipt of `attempt`'s part of a bucket, of generation 0; books that do not add up are refused."""
    part = attempt.parts[bucket]
    return Receipt(
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
        input=attempt.source,
        shared_files=shared,
        software=attempt.software,
        settings=attempt.settings,
        made_by=attempt.made_by,
        attempts=attempt.number,
        started=attempt.started,
        seconds={stage: round(value, 3) for stage, value in (attempt.seconds | times).items()},
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
