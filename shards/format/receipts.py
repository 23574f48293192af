"""Receipts: the only thing that says that a part exists, one for each tar and bucket, created if there is none.

    ROOT/commits/256x256/00042.json             generation 0
    ROOT/commits/256x256/00042.g0.recalled      a tombstone: generation 0 is no longer in force …
    ROOT/commits/256x256/00042.g1.json          … and this is what came in its place

A receipt says how many samples were stored and how many were refused and why (they add up to `samples_in`), which
ones, as bits, and the size and SHA-256 of every file of the part. The bits of all receipts of a tar are in one
order, that of its sorted keys, so that what a tar gave over all buckets follows from its receipts alone.
"""

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError, model_validator

from shards.base.config import Config
from shards.base.durable import DamagedFile, check_version, parse_sealed_json, sealed_json
from shards.base.errors import RequestError

FOLDER = "commits"
INDEX_NAME = "index.json"
"""A part's own list of its files of samples, in streaming's words."""
VERSION = 2
GENERATION = re.compile(r"(?P<tar>.+?)(?:\.g(?P<generation>[1-9]\d*))?\.json")
TOMBSTONE = re.compile(r"(?P<tar>.+)\.g(?P<generation>\d+)\.recalled")


class FileRecord(Config):
    """A committed file: its size in bytes and its SHA-256."""

    bytes: int
    sha256: str


class MdsFile(Config):
    """A file of samples, as a bucket's index lists it."""

    basename: str
    bytes: int
    samples: int
    hash: str
    """xxh3_64, 16 hex digits."""


def mds_file(entry: Mapping[str, Any]) -> MdsFile:
    """Of an entry of an index.json."""
    raw = entry["raw_data"]
    (digest,) = raw["hashes"].values()
    return MdsFile(basename=raw["basename"], bytes=raw["bytes"], samples=entry["samples"], hash=digest)


class MadeBy(Config):
    """Who made a part: what is asked for when a machine turns out to be bad."""

    host: str
    gpu: str
    """The device's name. `version` is the product's."""
    gpu_uuid: str | None
    """None for a CPU."""
    version: str
    source_sha256: str
    """Over its Python files."""


class Receipt(Config):
    """The commit of one tar's part of one bucket."""

    version: Literal[2] = 2
    tar: str
    bucket: str
    generation: int
    """How many receipts of this tar and bucket were recalled before."""
    token: str
    """The attempt's: who finds it in a receipt has written that receipt."""
    encoding_id: str
    rule: str
    """Which pictures the bucket holds: `covers`, all that cover it, or `nearest, ` and the aspect table in which it is
    the bucket of their ratio."""
    part: str
    """The folder below the bucket's: 00042.3fa9c1d2, by its content."""
    files: dict[str, FileRecord]
    """Path relative to the part's folder → record."""
    mds: tuple[MdsFile, ...]
    """The part's files of samples, in order."""
    samples_in: int
    samples: int
    stored: str
    """Which of the tar's samples the part holds: bits, as `pack_bits` gives them, in the order of the tar's sorted
    keys."""
    refused: dict[str, int]
    """Reason → count, of the tar's samples that are not in this part."""
    rejects: dict[str, str]
    """Reason → bits, of those refused for another reason than their size or ratio. One that no bucket stores is the
    tar's reject."""
    captions: dict[str, int]
    """Captions `stored`, and of these: with `invalid_utf8`, with `control_characters`, `too_long` for
    `limits.max_caption_characters`, and `truncated` by the tokenizer. All were changed for it."""
    input: dict[str, str | int | None]
    """The tar: its address, bytes, and SHA-256."""
    shared_files: dict[str, FileRecord]
    """uncond.safetensors and encoding.json, by path relative to the root."""
    software: dict[str, str]
    """Package → version."""
    settings: dict[str, str | int | float | bool]
    """What else decided over the stored bytes, by rounding (device, batch size, compilation) or by what was refused
    (limits). All that changes what the numbers mean is in encoding.json."""
    made_by: MadeBy
    attempts: int
    started: str
    seconds: dict[str, float]
    """Stage → wall-clock seconds that were spent waiting for it: fetch, decode, encode, write, upload; those in which
    the device was at work, `device`, and of them each tower's, `device.texts.NAME`; `worker`, since it committed the
    tar before; and `total`, in which stages overlap."""

    @model_validator(mode="after")
    def _adds_up(self) -> "Receipt":
        told = {
            "samples and refusals": self.samples + sum(self.refused.values()) - self.samples_in,
            "bits": int(self.stored_samples.sum()) - self.samples,
            "MDS files": sum(file.samples for file in self.mds) - self.samples,
        }
        for reason in self.rejects:
            told[f"{reason} bits"] = int(self.rejected_samples(reason).sum()) - self.refused.get(reason, 0)
        for what, difference in told.items():
            if difference:
                raise ValueError(f"receipt {self.name}: {what} are off by {difference} of {self.samples_in} samples")
        return self

    @property
    def name(self) -> str:
        """Relative to the root."""
        return receipt_name(self.bucket, self.tar, self.generation)

    @property
    def folder(self) -> str:
        """The part's, relative to the root."""
        return f"{self.bucket}/{self.part}"

    @property
    def stored_samples(self) -> NDArray[np.bool_]:
        """(samples_in,) by sorted key."""
        return unpack_bits(self.stored, self.samples_in)

    def rejected_samples(self, reason: str) -> NDArray[np.bool_]:
        """(samples_in,) by sorted key."""
        return unpack_bits(self.rejects[reason], self.samples_in)

    def sealed(self) -> bytes:
        return sealed_json(self.model_dump(mode="json"))


def pack_bits(values: NDArray[np.bool_]) -> str:
    """(n,) → base64 of eight to a byte."""
    return base64.b64encode(np.packbits(values).tobytes()).decode()


def unpack_bits(text: str, count: int) -> NDArray[np.bool_]:
    """The first `count` of `pack_bits`' values.

    Raises:
        ValueError: `text` holds another number.
    """
    data = base64.b64decode(text, validate=True)
    if len(data) != -(-count // 8):
        raise ValueError(f"{len(data)} bytes of bits for {count} samples")
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count).astype(bool)


def receipt_name(bucket: str, tar: str, generation: int = 0) -> str:
    """Relative to the root.

    Raises:
        RequestError: the tar's name would read as a generation.
    """
    if re.search(r"\.g\d+$", tar):
        raise RequestError(f"The tar {tar} has a name that ends as a receipt's generation does. Rename it.")
    return f"{FOLDER}/{bucket}/{tar}{f'.g{generation}' if generation else ''}.json"


def tombstone_name(bucket: str, tar: str, generation: int) -> str:
    """Relative to the root."""
    return f"{FOLDER}/{bucket}/{tar}.g{generation}.recalled"


def parse_name(name: str) -> tuple[str, str, int, bool] | None:
    """commits/BUCKET/FILE → bucket, tar, generation, whether it is a tombstone; None for another file."""
    top, _, rest = name.partition("/")
    bucket, _, file = rest.partition("/")
    match = TOMBSTONE.fullmatch(file) or GENERATION.fullmatch(file)
    if top != FOLDER or match is None or file.startswith(".") or "/" in file:
        return None
    return bucket, match["tar"], int(match["generation"] or 0), file.endswith(".recalled")


def generations(names: Iterable[str]) -> dict[tuple[str, str], tuple[set[int], set[int]]]:
    """(tar, bucket) → generations that have a receipt, and those that were recalled."""
    found: dict[tuple[str, str], tuple[set[int], set[int]]] = {}
    for name in names:
        if parsed := parse_name(name):
            bucket, tar, generation, recalled = parsed
            found.setdefault((tar, bucket), (set(), set()))[recalled].add(generation)
    return found


def names_in_force(names: Iterable[str]) -> list[str]:
    """Select the receipts in force from the names in commits/: each tar's newest per bucket, unless it was recalled."""
    return [
        receipt_name(bucket, tar, max(made))
        for (tar, bucket), (made, recalled) in sorted(generations(names).items())
        if made and max(made) not in recalled
    ]


def parse_receipt(data: bytes, where: str) -> Receipt:
    """A receipt's bytes, which came from `where`.

    Raises:
        DamagedFile: they are not those that were written, or do not add up.
        RequestError: a later version of this program wrote them.
    """
    fields: Mapping[str, Any] = parse_sealed_json(data, where)
    check_version(fields.get("version"), VERSION, where)
    try:
        return Receipt.model_validate(fields)
    except ValidationError as error:
        raise DamagedFile(f"{where} does not add up: {error.errors()[0]['msg']}. Restore it from a copy.") from None
