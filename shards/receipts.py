"""Receipts: what one input shard gave, and the only thing that says it exists.

A receipt lists, for every bucket, how many samples were stored and how many were refused and why, so that
`samples + Σ refused = samples_in` holds for each; and the size and SHA-256 of every file that the shard committed.
"""

from pathlib import Path

from pydantic import model_validator

from shards.config import Config
from shards.files import read_sealed_json, write_sealed_json

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
    files: dict[str, FileRecord]
    """Path relative to the part's folder → record."""


class Receipt(Config):
    """The commit of one input shard."""

    shard: str
    encoding_id: str
    samples_in: int
    encoded: int
    """Samples that are in at least one bucket."""
    rejected: dict[str, int]
    """Reason → count, of the samples that are in no bucket: the rows of rejects/SHARD.parquet."""
    truncated_captions: int
    """Stored captions that were longer than the text encoder takes, and were cut."""
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

    def save(self, root: Path) -> None:
        """The commit point: one atomic replace of ROOT/commits/SHARD.json."""
        write_sealed_json(root / FOLDER / f"{self.shard}.json", self.model_dump(mode="json"))


def load_receipt(root: Path, shard: str) -> Receipt | None:
    """The receipt of `shard`, or None where it was never committed.

    Raises:
        DamagedFile: the receipt's bytes are not those that were written.
    """
    try:
        return Receipt.model_validate(read_sealed_json(root / FOLDER / f"{shard}.json"))
    except FileNotFoundError:
        return None


def load_receipts(root: Path) -> list[Receipt]:
    """Every receipt of the root, by shard name."""
    return [Receipt.model_validate(read_sealed_json(path)) for path in sorted((root / FOLDER).glob("[!.]*.json"))]
