"""The interface between stage 1 and every kind of input: units of work, and the samples in them.

A *unit* is the piece of an input that one attempt encodes and commits as a whole: a tar, or a group of image files,
parquet row groups or MDS files. Reading a unit twice yields the same samples in the same order, and its
SHA-256 changes if any of them does.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shards.base.config import Config
from shards.base.errors import RequestError

IMAGE_SUFFIXES = {"jpg", "jpeg", "png", "webp", "gif", "tif", "tiff", "avif"}
CAPTION_SUFFIXES = {"txt", "caption"}
SAMPLE_SUFFIXES = IMAGE_SUFFIXES | CAPTION_SUFFIXES | {"json"}
"""Suffixes of the files of a sample that are read; others in a tar, such as a video or a class label, are not."""
MAX_JSON_BYTES = 1 << 20
"""Maximum size of a sample's JSON. Parsing takes up to 30 times as much memory. Larger JSON is ignored, as is
invalid JSON."""

InputRecord = dict[str, str | int | None]
"""Description of a unit in receipts: its address, size in bytes and SHA-256, and any damage."""
Policy = Literal["reject", "salvage"]


class Unusable(RequestError):
    """An input has files of a kind, but none of them can be used."""


def unreadable(where: str, error: OSError) -> RequestError:
    """Build the error for a file of the input that is missing, or that this user may not read."""
    return RequestError(
        f"{where} cannot be read: {error.strerror or error}. If it was removed, run the command again; otherwise, let "
        f"this user read it."
    )


class InputConfig(Config):
    """Handling of damaged inputs."""

    policy: Policy = "reject"
    """With `reject`, a damaged unit, such as a truncated tar, fails. With `salvage`, its intact samples are used and
    the lost ones are recorded."""
    check_sha256: bool = False
    """Check each image against the `sha256` in its JSON, if present. Use this for tars from `make download`, but not if
    img2dataset itself re-encoded the images, because it records the hash of the download."""


@dataclass
class RawSample:
    """A sample as it is in the input, undecoded."""

    key: str
    image: bytes | None = None
    caption: bytes | None = None
    """Content of the text file beside the image."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Fields of the JSON beside the image, or columns of the sample's row."""
    tables: dict[str, str | float | None] = field(default_factory=dict)
    """Values of every column of the job's tables, or None where a table lacks the sample."""
    oversized: str = ""
    """Name and size of a file that was not read because it exceeds the size limit; empty if there is none."""
    lost: str = ""
    """Reason why damage to the input made this sample unusable; empty for an intact sample."""


class Source(Protocol):
    """A unit that is open for reading."""

    def samples(self) -> Iterator[RawSample]:
        """Yield the samples. May be called only once. Raises DamagedInput if the unit cannot be read, unless the
        policy is `salvage`."""

    def record(self) -> InputRecord:
        """Describe the unit for receipts, once all samples have been read."""


@dataclass(frozen=True)
class Unit:
    """A unit of work, such as the tar 00042."""

    name: str
    """Name of its parts in the root, such as 00042."""
    address: str
    """Path or URL of the input, for messages and receipts."""

    @contextmanager
    def open(self, max_bytes: int, policy: Policy = "reject") -> Iterator[Source]:
        """Open the unit. Files of more than `max_bytes` are not read.

        Raises DamagedInput if the unit is damaged and cannot be read under this policy, and Outage if the storage
        cannot be read.
        """
        yield HashedSource(self.address, self._samples(max_bytes, policy))

    def _samples(self, max_bytes: int, policy: Policy) -> Iterator[RawSample]:
        """Yield the samples of a unit that is not a single file."""
        raise NotImplementedError

    def head(self, max_bytes: int) -> Iterator[RawSample]:
        """Yield the first intact samples, to inspect their fields."""
        with self.open(max_bytes, "salvage") as source:
            yield from (sample for sample in source.samples() if not sample.lost)


class HashedSource:
    """A source that hashes its samples while they are read, for inputs that are not a single file."""

    def __init__(self, address: str, samples: Iterator[RawSample]):
        self.address = address
        self._samples, self._digest, self._bytes, self._lost = samples, hashlib.sha256(), 0, list[str]()

    def samples(self) -> Iterator[RawSample]:
        for sample in self._samples:
            fields = (
                sample.key.encode(),
                sample.image,
                sample.caption,
                json.dumps(sample.metadata, sort_keys=True, default=str).encode(),
                sample.oversized.encode(),
            )
            for value in fields:
                length = -1 if value is None else len(value)
                self._digest.update(length.to_bytes(8, "little", signed=True) + (value or b""))
                self._bytes += max(length, 0)
            if sample.lost:
                self._lost.append(sample.lost)
            yield sample

    def record(self) -> InputRecord:
        record: InputRecord = {"address": self.address, "bytes": self._bytes, "sha256": self._digest.hexdigest()}
        if self._lost:
            record |= {"damage": self._lost[0], "lost": len(self._lost), "lost_unnamed": 0}
        return record


def parse_json(data: bytes) -> dict[str, Any]:
    """Return the fields of a sample's JSON, or an empty dict if it is too large or not a JSON object. Invalid UTF-8
    stays recognisable, and affects only the text that contains it."""
    try:
        parsed = json.loads(data.decode("utf-8-sig", errors="surrogateescape")) if len(data) <= MAX_JSON_BYTES else None
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def escaped(name: str) -> str:
    """Escape the bytes of a file name that are not valid UTF-8, so that it can be stored as text."""
    return name.encode("utf-8", "backslashreplace").decode()
