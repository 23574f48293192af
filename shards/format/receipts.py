"""Receipts, the only record of which parts exist. There is one per tar and bucket, created at most once.

    ROOT/commits/256x256/00042.json             generation 0
    ROOT/commits/256x256/00042.g0.recalled      tombstone: generation 0 is no longer valid …
    ROOT/commits/256x256/00042.g1.json          … and was replaced by generation 1

A receipt records how many samples were stored, and how many were refused and why (the counts add up to `samples_in`).
It also contains bitmaps of these samples, and the size and SHA-256 of every file in the part. The bitmaps in all of a
tar's receipts follow the order of its sorted keys, so a tar's outcome over all buckets can be computed from its
receipts alone.
"""

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from shards.base.config import Config
from shards.base.durable import DamagedFile, check_version, parse_sealed_json, sealed_json
from shards.base.errors import RequestError
from shards.base.table import counted

FOLDER = "commits"
VERSION = 2
GENERATION = re.compile(r"(?P<tar>.+?)(?:\.g(?P<generation>[1-9]\d*))?\.json")
TOMBSTONE = re.compile(r"(?P<tar>.+)\.g(?P<generation>\d+)\.recalled")
ORIGIN = "derived_from"
"""Receipt setting of a derived part: the encoding id and folder of its source part. `derived_from.host`, `.gpu` and
`.gpu_uuid` record where the source part was encoded."""


class FileRecord(Config):
    """Size in bytes and SHA-256 of a committed file."""

    bytes: int
    sha256: str


class MdsFile(Config):
    """MDS file as listed in a bucket's index."""

    basename: str
    bytes: int
    samples: int
    hash: str
    """xxh3_64, 16 hex digits."""


class MadeBy(Config):
    """Machine and software that produced a part, recorded so that a faulty machine's parts can be found later."""

    host: str
    gpu: str
    """Name of the device."""
    gpu_uuid: str | None
    """UUID of the GPU, or None for a CPU."""
    version: str
    """Version of latentmill."""
    source_sha256: str
    """SHA-256 over latentmill's Python files."""


class Receipt(Config):
    """Record of the commit of one tar's part in one bucket."""

    version: Literal[2] = 2
    tar: str
    bucket: str
    generation: int
    """Number of earlier receipts for this tar and bucket that were recalled."""
    token: str
    """Token of the attempt. An attempt that finds its own token in a receipt knows that it won the commit."""
    encoding_id: str
    rule: str
    """Rule that assigns images to the bucket: `covers`, or `nearest, ` and the aspect table. See `bucket_rules`."""
    part: str
    """Content-addressed folder below the bucket's folder, such as 00042.3fa9c1d2."""
    files: dict[str, FileRecord]
    """Path relative to the part's folder → record."""
    mds: tuple[MdsFile, ...]
    """MDS files of the part, in order."""
    samples_in: int
    samples: int
    stored: str
    """Bitmap of the tar's samples in this part, in the order of the tar's sorted keys. See `pack_bits`."""
    refused: dict[str, int]
    """Reason → number of the tar's samples that are not in this part for this reason."""
    rejects: dict[str, str]
    """Reason → bitmap of the samples refused for a reason other than size or aspect ratio. A sample that no bucket
    stores counts as rejected from the tar."""
    captions: dict[str, int]
    """Caption counts: all `stored` captions, and those modified because they had `invalid_utf8` or
    `control_characters`, were `too_long` for `limits.max_caption_characters`, or were `truncated` by the tokenizer."""
    licenses: dict[str, int] = Field(default_factory=dict)
    """Licence, as the input states it → number of stored samples."""
    input: dict[str, str | int | None]
    """Path or URL, size in bytes and SHA-256 of the tar."""
    shared_files: dict[str, FileRecord]
    """Records of uncond.safetensors and encoding.json, by path relative to the root."""
    software: dict[str, str]
    """Package → version."""
    settings: dict[str, str | int | float | bool]
    """Settings outside encoding.json that affect the stored bytes, either through rounding (device, batch size,
    compilation) or through refused samples (limits)."""
    made_by: MadeBy
    attempts: int
    started: str
    seconds: dict[str, float]
    """Stage (fetch, decode, encode, write, upload) → wall-clock seconds spent waiting for the stage. In addition,
    `device` is the time the device was busy, with a share per tower (`device.texts.NAME`), `worker` is the time since
    the worker's previous commit, and `total` counts overlapping stages once."""

    @model_validator(mode="after")
    def _adds_up(self) -> "Receipt":
        differences = {
            "samples plus refusals": self.samples + sum(self.refused.values()) - self.samples_in,
            "bits in `stored`": int(self.stored_samples.sum()) - self.samples,
            "samples in MDS files": sum(file.samples for file in self.mds) - self.samples,
        }
        for reason in self.rejects:
            num_bits = int(self.rejected_samples(reason).sum())
            differences[f"bits in `rejects.{reason}`"] = num_bits - self.refused.get(reason, 0)
        for what, difference in differences.items():
            if difference:
                raise ValueError(
                    f"receipt {self.name}: the number of {what} is off by {difference}; the tar has "
                    f"{counted(self.samples_in, 'sample')}"
                )
        return self

    @property
    def name(self) -> str:
        """Name of the receipt relative to the root."""
        return receipt_name(self.bucket, self.tar, self.generation)

    @property
    def folder(self) -> str:
        """Folder of the part relative to the root."""
        return f"{self.bucket}/{self.part}"

    @property
    def stored_samples(self) -> NDArray[np.bool_]:
        """(samples_in,) Mask of stored samples, by sorted key."""
        return unpack_bits(self.stored, self.samples_in)

    def rejected_samples(self, reason: str) -> NDArray[np.bool_]:
        """Return the (samples_in,) mask of the samples rejected for `reason`, by sorted key."""
        return unpack_bits(self.rejects[reason], self.samples_in)

    def sealed(self) -> bytes:
        return sealed_json(self.model_dump(mode="json"))


def pack_bits(values: NDArray[np.bool_]) -> str:
    """Encode a boolean array (n,) as base64, with eight values per byte."""
    return base64.b64encode(np.packbits(values).tobytes()).decode()


def unpack_bits(text: str, count: int) -> NDArray[np.bool_]:
    """Decode the boolean array (count,) that `pack_bits` encoded. Raises ValueError if `text` encodes a different
    number of values."""
    data = base64.b64decode(text, validate=True)
    if len(data) != -(-count // 8):
        raise ValueError(f"a bitmap of {counted(len(data), 'byte')} does not match {counted(count, 'sample')}")
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count).astype(bool)


def receipt_name(bucket: str, tar: str, generation: int = 0) -> str:
    """Return the name of a receipt relative to the root. Raises RequestError if the tar's name ends in a generation
    suffix."""
    if re.search(r"\.g\d+$", tar):
        raise RequestError(
            f"The tar name {tar} ends in .gN, a suffix reserved for receipt generations. Rename the tar."
        )
    return f"{FOLDER}/{bucket}/{tar}{f'.g{generation}' if generation else ''}.json"


def tombstone_name(bucket: str, tar: str, generation: int) -> str:
    """Return the name of a tombstone relative to the root."""
    return f"{FOLDER}/{bucket}/{tar}.g{generation}.recalled"


def parse_name(name: str) -> tuple[str, str, int, bool] | None:
    """Parse commits/BUCKET/FILE into bucket, tar, generation, and whether the file is a tombstone. Return None for
    other files."""
    top, _, rest = name.partition("/")
    bucket, _, file = rest.partition("/")
    match = TOMBSTONE.fullmatch(file) or GENERATION.fullmatch(file)
    if top != FOLDER or match is None or file.startswith(".") or "/" in file:
        return None
    return bucket, match["tar"], int(match["generation"] or 0), file.endswith(".recalled")


def generations(names: Iterable[str]) -> dict[tuple[str, str], tuple[set[int], set[int]]]:
    """Map each (tar, bucket) to the generations that have a receipt and those that were recalled."""
    found: dict[tuple[str, str], tuple[set[int], set[int]]] = {}
    for name in names:
        if parsed := parse_name(name):
            bucket, tar, generation, recalled = parsed
            found.setdefault((tar, bucket), (set(), set()))[recalled].add(generation)
    return found


def active_parts(names: Iterable[str]) -> dict[tuple[str, str], str]:
    """Map each (tar, bucket), in sorted order, to the name of its newest receipt. Parts whose newest receipt was
    recalled are left out."""
    return {
        (tar, bucket): receipt_name(bucket, tar, max(made))
        for (tar, bucket), (made, recalled) in sorted(generations(names).items())
        if made and max(made) not in recalled
    }


def active_receipts(names: Iterable[str]) -> list[str]:
    """Return the names of the active receipts among the names in commits/, ordered by tar and bucket."""
    return list(active_parts(names).values())


def parse_receipt(data: bytes, where: str) -> Receipt:
    """Parse the bytes of a receipt. Raises DamagedFile if it was modified after it was written or its counts are
    inconsistent, and RequestError if it has a different format version."""
    fields: Mapping[str, Any] = parse_sealed_json(data, where)
    check_version(fields.get("version"), VERSION, where)
    try:
        return Receipt.model_validate(fields)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise DamagedFile(f"{where} is inconsistent: {problem}. Restore it from a backup.") from None
