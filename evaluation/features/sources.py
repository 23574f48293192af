"""Image sources, divided into units: parts of a sample set, tars, or groups of image files in a folder.

Reference images go through stage 1's pixel pipeline, whatever their format, so that a model is compared with images
that were cropped and resized like its training data.
"""

import hashlib
import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image
from pydantic import field_validator, model_validator

from evaluation.parts import PartReceipt, read_part
from evaluation.sampling.sets import SampleSet
from precompute.encode.overlap import map_in_order, threads
from precompute.input.find import find_input
from precompute.input.reject import Reject
from precompute.input.unit import RawSample, escaped
from precompute.input.unit import Unit as InputUnit
from precompute.pixels.blur import boxes_of
from precompute.pixels.decode import LimitsConfig, Picture, PixelsConfig, decode
from precompute.pixels.isolation import CLOCK_PER_PROCESSOR_SECOND, Isolated
from shards.base.config import Config
from shards.base.durable import canonical_json
from shards.base.store import LocalPath, Place
from shards.format.buckets import Bucket, BucketName
from shards.open import open_store

Decode = Callable[..., Picture]
"""Function with the signature of `precompute.pixels.decode.decode`."""
SELECTING_LIMITS = {"formats", "max_pixels", "max_side", "max_bytes"}
"""Limits that determine which images belong to a reference."""


class ReferenceConfig(Config):
    """The reference: images that a model's samples are compared with."""

    place: Place | None = None
    """Folder or URL where the reference's features are stored."""
    pictures: str | None = None
    """Folder or URL of images, in any form that stage 1 accepts. null: the features already exist at `place`."""
    moments: LocalPath | None = None
    """An npz file with `mu` and `sigma`, in the format of pytorch-fid and MLPerf. Replaces `place` and `pictures`, but
    suffices only for `fid`, `clip_fid`, `fd_dinov2` and `toy_fid`."""
    size: BucketName = "512x512"
    """Size of the reference images (WIDTHxHEIGHT, in pixels), which must equal the samples' size. Smaller images are
    skipped."""
    pixels: PixelsConfig = PixelsConfig()
    limits: LimitsConfig = LimitsConfig()

    @field_validator("pictures")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        # the record at `place` contains this path, so it must not depend on the working directory
        return value if value is None or "://" in value else os.path.abspath(value)

    @model_validator(mode="after")
    def _pictures_or_moments(self) -> Self:
        if self.moments is not None and self.pictures is not None:
            raise ValueError("`moments` replaces the reference's images, so set only one of `moments` and `pictures`")
        return self

    def record(self) -> dict[str, Any]:
        """Return the settings that determine which images belong to the reference and what their pixels are."""
        pixels = self.pixels
        own = {"size": self.size, "decoder": pixels.decoder, "resampling": pixels.resampling, "crop": pixels.crop}
        return {**own, "limits": self.limits.model_dump(mode="json", include=SELECTING_LIMITS)}


@dataclass
class InputRecord:
    """Facts about a unit's input, filled in while its images are read."""

    input: str = ""
    """SHA-256 of the input's content."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Reason → number of rejected images."""


@dataclass(frozen=True)
class SampleUnit:
    """A committed part of a sample set."""

    name: str
    place: Path | str
    """Folder or URL of the sample set."""
    receipt: PartReceipt
    texts: tuple[str, ...]
    """Prompt of each image."""

    def pictures(self, record: InputRecord, isolate: bool = False) -> Generator[np.ndarray, None, None]:
        """Yield the images in order, each (height, width, 3) uint8.

        `isolate` has no effect: `evaluation sample` wrote these files, so they can be decoded safely.

        Raises:
            DamagedInput: a file is missing or damaged.
        """
        files = read_part(open_store(self.place), self.receipt)
        record.input = hashlib.sha256("".join(self.receipt["files"].values()).encode()).hexdigest()
        for data in files.values():
            yield np.asarray(Image.open(io.BytesIO(data), formats=["PNG", "WEBP"]))


@dataclass(frozen=True)
class ReferenceUnit:
    """A unit of reference images, such as a tar."""

    name: str
    source: InputUnit
    config: ReferenceConfig
    decode: Decode = decode

    def pictures(self, record: InputRecord, isolate: bool = False) -> Generator[np.ndarray, None, None]:
        """Yield all images that are valid and large enough, in the source's order, each (height, width, 3) uint8.

        With `isolate`, a child process decodes the images, and any image that crashes or hangs that process is rejected
        as `decoder_crash`.

        Raises:
            Stuck: a decoding thread hangs, so the process must be ended.
        """
        bucket, config = Bucket.parse(self.config.size), self.config
        longest = None if isolate else CLOCK_PER_PROCESSOR_SECOND * config.limits.decode_seconds

        def decode_one(sample: RawSample) -> np.ndarray | Reject:
            try:
                if sample.image is None:
                    raise Reject("no_image", "the sample has no image")
                boxes = boxes_of(sample.metadata, config.pixels.blur_boxes)
                return decode(sample.image, [bucket], config.pixels, config.limits, (), boxes).pixels[bucket]
            except Reject as reject:
                return reject

        with (
            closing(self._samples(record)) as samples,
            Isolated(self.decode, config.limits) if isolate else nullcontext(self.decode) as decode,
            threads(1, longest) as pool,
        ):
            for found in map_in_order(pool, decode_one, samples, 1, longest):
                if isinstance(found, Reject):
                    record.rejected[found.reason] += 1
                else:
                    yield found

    def _samples(self, record: InputRecord) -> Generator[RawSample, None, None]:
        with self.source.open(self.config.limits.max_bytes) as source:
            yield from source.samples()
            record.input = str(source.record()["sha256"])


Unit = SampleUnit | ReferenceUnit


def sample_units(samples: SampleSet) -> list[SampleUnit]:
    """Return the parts of a sample set as units."""
    texts = {prompt.id: prompt.text for prompt in samples.prompts}
    return [
        SampleUnit(name, samples.place, receipt, tuple(texts[prompt_id] for prompt_id, _ in receipt["samples"]))
        for name, receipt in samples.parts.items()
    ]


@cache
def say_once(text: str) -> None:
    """Print a text to stderr unless this process has printed it before, for facts that every metric would repeat."""
    print(text, file=sys.stderr, flush=True)


def reference_units(config: ReferenceConfig) -> tuple[list[ReferenceUnit], str]:
    """Divide a reference into units, as stage 1 does, and print notes about its files, such as ignored ones, once.

    Returns:
        The units, and the SHA-256 of the names and sizes of all image files, tars or other pieces of the input.

    Raises:
        RequestError: the folder contains no images.
    """
    assert config.pictures is not None
    found = find_input(config.pictures)
    for note in found.notes:
        say_once(f"note: reference.pictures ({config.pictures}) is read like the input of a stage 1 job: {note}")
    files = sorted([escaped(member.name), member.bytes] for member in found.members)
    listed = hashlib.sha256(canonical_json(files)).hexdigest()
    return [ReferenceUnit(unit.name, unit, config) for unit in found.units()], listed
