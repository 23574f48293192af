"""Receipts: what one input shard gave, and the only thing that says it exists.

A receipt lists, for every bucket, how many samples were stored and how many were refused and why, so that
`samples + Σ refused = samples_in` holds for each; and the size and SHA-256 of every file that the shard committed.
"""

from collections.abc import Iterable
from typing import Any

from pydantic import model_validator

from shards.base.config import Config
from shards.base.durable import parse_sealed_json, sealed_json
from shards.base.errors import RequestError
from shards.base.store import Store
from shards.format.buckets import COVERS

FOLDER = "commits"


class FileRecord(Config):
    """A committed file: its size in bytes and its SHA-256."""

    bytes: int
    sha256: str


class Part(Config):
    """What one input shard put into one bucket."""

    samples: int
    refused: dict[str, int]
    """Reason → count, of the input shard's samples that are not in this bucket."""
    rule: str = COVERS
    """Which pictures the bucket holds: `covers`, all that cover it, or `nearest, ` and the aspect table in which it is
    the bucket of their ratio."""
    files: dict[str, FileRecord]
    """Path relative to the part's folder → record."""
    settings: dict[str, str | int | float | bool] | None = None
    software: dict[str, str] | None = None
    """The receipt's, of the attempt that made this part; None in the first receipts, where they are the receipt's."""


class Receipt(Config):
    """The commit of one input shard."""

    shard: str
    encoding_id: str
    samples_in: int
    encoded: int
    """Samples that are in at least one bucket."""
    rejected: dict[str, int]
    """Reason → count, of the samples that are in no bucket: the rows of rejects/SHARD.parquet."""
    captions: dict[str, int]
    """Captions `stored`, and of these: with `invalid_utf8`, with `control_characters`, `too_long` for
    `limits.max_caption_characters`, and `truncated` by the tokenizer. All were mended or cut."""
    input: dict[str, str | int | None]
    """The tar: its address, bytes, and SHA-256."""
    parts: dict[str, Part]
    shared_files: dict[str, FileRecord]
    """uncond.safetensors and encoding.json, by path relative to the root."""
    software: dict[str, str]
    """Package → version."""
    settings: dict[str, str | int | float | bool]
    """What else decided over the stored bytes, by rounding (device, batch size, compilation) or by what was refused
    (limits). All that changes what the numbers mean is in encoding.json."""
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

    def save(self, store: Store) -> None:
        """The commit point: one atomic replace of ROOT/commits/SHARD.json."""
        store.write(f"{FOLDER}/{self.shard}.json", sealed_json(self.model_dump(mode="json")))


def committed_shards(store: Store) -> list[str]:
    """The shards that have a receipt, sorted."""
    names = (name for name in store.files(FOLDER) if name.endswith(".json") and not name.startswith("."))
    return [name.removesuffix(".json") for name in names]


def load_receipt(store: Store, shard: str) -> Receipt | None:
    """The receipt of `shard`, or None where it was never committed.

    Raises:
        DamagedFile: the receipt's bytes are not those that were written.
    """
    name = f"{FOLDER}/{shard}.json"
    try:
        return Receipt.model_validate(parse_sealed_json(store.read(name), store.where(name)))
    except FileNotFoundError:
        return None


def load_receipts(store: Store, shards: Iterable[str] | None = None) -> list[Receipt]:
    """The receipts of those of `shards` that are committed, or every one of the root, by shard name; read at once.

    Raises:
        DamagedFile: the bytes of one are not those that were written.
    """
    names = committed_shards(store) if shards is None else shards
    found = store.read_many([f"{FOLDER}/{shard}.json" for shard in names])
    return [Receipt.model_validate(parse_sealed_json(data, store.where(name))) for name, data in sorted(found.items())]


def load_committed(store: Store) -> list[Receipt]:
    """Every receipt of a root that holds something.

    Raises:
        RequestError: nothing is committed to it.
    """
    receipts = load_receipts(store)
    if not receipts:
        raise RequestError(f"{store.where()} holds no committed shard yet: run `make precompute` first.")
    return receipts
