"""Receipts of version 1, commits/TAR.json: one for all buckets of a tar, replaced when a bucket was added."""

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
from pydantic import ValidationError, model_validator

from shards.base.config import Config
from shards.base.durable import DamagedFile, parse_sealed_json
from shards.base.store import Store
from shards.format import receipts
from shards.format.buckets import COVERS
from shards.format.receipts import INDEX_NAME, FileRecord
from shards.format.tables import CAPTION_CHANGES, TOO_SMALL, Columns, read_recorded, read_tables


class Part(Config):
    """What one input shard put into one bucket; the same holds of its fields."""

    samples: int
    refused: dict[str, int]
    rule: str = COVERS
    files: dict[str, FileRecord]
    settings: dict[str, str | int | float | bool] | None = None
    software: dict[str, str] | None = None
    """The receipt's, of the attempt that made this part; None in the first receipts, where they are the receipt's."""


class Receipt(Config):
    """The commit of one input shard. What has the name that it has in version 2 means the same."""

    shard: str
    encoding_id: str
    samples_in: int
    encoded: int
    """Samples that are in at least one bucket."""
    rejected: dict[str, int]
    """Reason → count, of the samples that are in no bucket: the rows of rejects/SHARD.parquet."""
    captions: dict[str, int]
    input: dict[str, str | int | None]
    parts: dict[str, Part]
    shared_files: dict[str, FileRecord]
    software: dict[str, str]
    settings: dict[str, str | int | float | bool]
    attempts: int
    """Like `software`, `settings` and the times, of the last attempt; each part has its own `settings`, `software`."""
    started: str
    seconds: float

    @model_validator(mode="after")
    def _adds_up(self) -> "Receipt":
        totals = {"the shard": self.encoded + sum(self.rejected.values())}
        totals |= {name: part.samples + sum(part.refused.values()) for name, part in self.parts.items()}
        for what, total in totals.items():
            if total != self.samples_in:
                raise ValueError(f"receipt {self.shard}: {what} accounts for {total} of {self.samples_in} samples")
        return self

    def made_by(self, bucket: str) -> dict[str, dict[str, Any]]:
        """`settings` and `software` of the attempt that made a bucket's part."""
        part = self.parts[bucket]
        return {
            "settings": self.settings if part.settings is None else part.settings,
            "software": self.software if part.software is None else part.software,
        }


def read_receipt(store: Store, name: str) -> Receipt:
    """A receipt of version 1 as it is.

    Raises:
        DamagedFile: its bytes are not those that were written.
    """
    return _parse(store.read(name), store.where(name))


def _parse(data: bytes, where: str) -> Receipt:
    try:
        return Receipt.model_validate(parse_sealed_json(data, where))
    except ValidationError as error:
        raise DamagedFile(f"{where} does not add up: {error.errors()[0]['msg']}. Restore it from a copy.") from None


def parse_version1(store: Store, data: bytes, name: str) -> list[receipts.Receipt]:
    """A receipt of version 1 → what version 2 says of the same parts, one receipt for each bucket.

    Which samples a part holds is read from its tables, which the receipt vouches for.

    Raises:
        DamagedFile: the receipt, an index or a table is not the one that was written.
    """
    where = store.where(name)
    old = _parse(data, where)
    folders = {bucket: (f"{bucket}/{old.shard}", part.files) for bucket, part in old.parts.items()}
    tables = {bucket: read_tables(store, *folder) for bucket, folder in folders.items()}
    listed = {key for stored, refused in tables.values() for key in (*stored["key"], *refused["key"])}
    if len(listed) != old.samples_in:
        raise DamagedFile(f"{where} counts {old.samples_in} samples; its parts' tables list {len(listed)}.")
    place = {key: number for number, key in enumerate(sorted(listed))}
    indexes = {bucket: _read_index(store, *folder) for bucket, folder in folders.items()}
    return [_adapt(old, bucket, place, *tables[bucket], indexes[bucket]) for bucket in sorted(old.parts)]


def _read_index(store: Store, folder: str, files: dict[str, FileRecord]) -> list[dict[str, Any]]:
    """The entries of a part's index; a part without samples has none."""
    found = read_recorded(store, folder, files, [INDEX_NAME] if INDEX_NAME in files else [])
    return [entry for data in found.values() for entry in json.loads(data)["shards"]]


def _adapt(
    old: Receipt, bucket: str, place: dict[str, int], stored: Columns, refused: Columns, index: list[dict[str, Any]]
) -> receipts.Receipt:
    def bits(keys: Iterable[str]) -> str:
        values = np.zeros(old.samples_in, bool)
        values[[place[key] for key in keys]] = True
        return receipts.pack_bits(values)

    part, rejected = old.parts[bucket], defaultdict[str, list[str]](list)
    for key, reason in zip(refused["key"], refused["reason"], strict=True):
        if reason != TOO_SMALL:
            rejected[reason].append(key)
    return receipts.Receipt(
        tar=old.shard,
        bucket=bucket,
        generation=0,
        token="",
        encoding_id=old.encoding_id,
        rule=part.rule,
        part=old.shard,
        files=part.files,
        mds=tuple(receipts.mds_file(entry) for entry in index),
        samples_in=old.samples_in,
        samples=part.samples,
        stored=bits(stored["key"]),
        refused=part.refused,
        rejects={reason: bits(keys) for reason, keys in sorted(rejected.items())},
        captions={"stored": sum(stored["captions"])} | {name: sum(stored[name]) for name in CAPTION_CHANGES},
        input=old.input,
        shared_files=old.shared_files,
        **old.made_by(bucket),
        made_by=None,
        attempts=old.attempts,
        started=old.started,
        seconds={"total": old.seconds},
    )
