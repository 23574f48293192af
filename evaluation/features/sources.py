"""Image sources, divided into units: parts of a sample set, tars, or groups of image files in a folder.

Reference images go through stage 1's pixel pipeline, whatever their format, so that a model is compared with images
that were cropped and resized like its training data.
"""

import hashlib
import io
import os
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image
from pydantic import field_validator, model_validator

from evaluation.parts import PartReceipt, read_part
from evaluation.sampling.job import SampleSet
from precompute.encode.overlap import map_in_order, threads
from precompute.input.layout import IMAGE_SUFFIXES
from precompute.input.reject import Reject
from precompute.input.tars import InputTar, Tar, list_tars, local_copy
from precompute.pixels.decode import LimitsConfig, Picture, PixelsConfig, decode
from precompute.pixels.isolation import CLOCK_PER_PROCESSOR_SECOND, Isolated
from shards.base.config import Config
from shards.base.errors import RequestError
from shards.base.store import Place
from shards.format.buckets import Bucket, BucketName
from shards.open import open_store

FILES_PER_UNIT = 500
Decode = Callable[..., Picture]
"""Function with the signature of `precompute.pixels.decode.decode`."""
SELECTING_LIMITS = {"formats", "max_pixels", "max_side", "max_bytes"}
"""Limits that determine which images belong to a reference."""


class ReferenceConfig(Config):
    """The reference: images that a model's samples are compared with."""

    place: Place | None = None
    """Folder or URL where the reference's features are stored."""
    pictures: str | None = None
    """Folder or URL of tars, or a folder of image files. null: the features already exist at `place`."""
    moments: Path | None = None
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
    """A tar of reference images, or a group of image files."""

    name: str
    source: InputTar | tuple[Path, ...]
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

        def decode_one(data: bytes | None) -> np.ndarray | Reject:
            try:
                if data is None:
                    raise Reject("no_image", "the sample has no image")
                return decode(data, [bucket], config.pixels, config.limits).pixels[bucket]
            except Reject as reject:
                return reject

        with (
            closing(self._encoded(record)) as images,
            Isolated(self.decode, config.limits) if isolate else nullcontext(self.decode) as decode,
            threads(1, longest) as pool,
        ):
            for found in map_in_order(pool, decode_one, images, 1, longest):
                if isinstance(found, Reject):
                    record.rejected[found.reason] += 1
                else:
                    yield found

    def _encoded(self, record: InputRecord) -> Generator[bytes | None, None, None]:
        """Yield the content of each image file, or None for a sample without an image."""
        if isinstance(self.source, InputTar):
            with local_copy(self.source.address) as path:
                tar = Tar(path, self.config.limits.max_bytes)
                tar.check(self.source)
                record.input = tar.sha256
                for sample in tar.samples():
                    yield sample.image
        else:
            digest = hashlib.sha256()
            for path in self.source:
                data = path.read_bytes()
                digest.update(hashlib.sha256(data).digest())
                yield data
            record.input = digest.hexdigest()


Unit = SampleUnit | ReferenceUnit


def sample_units(samples: SampleSet) -> list[SampleUnit]:
    """Return the parts of a sample set as units."""
    texts = {prompt.id: prompt.text for prompt in samples.prompts}
    return [
        SampleUnit(name, samples.place, receipt, tuple(texts[prompt_id] for prompt_id, _ in receipt["samples"]))
        for name, receipt in samples.parts.items()
    ]


def reference_units(config: ReferenceConfig) -> list[ReferenceUnit]:
    """Divide a reference into units: one for each tar, or one for every `FILES_PER_UNIT` image files.

    Raises:
        RequestError: the folder contains neither tars nor image files.
    """
    assert config.pictures is not None
    folder = Path(config.pictures)
    if "://" in config.pictures or any(folder.glob("*.tar")):
        return [ReferenceUnit(tar.name, tar, config) for tar in list_tars(config.pictures)]
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower().lstrip(".") in IMAGE_SUFFIXES)
    if not paths:
        raise RequestError(
            f"{folder} contains neither tars nor image files. Set reference.pictures to a folder with tars or "
            f"image files."
        )
    groups = [tuple(paths[start : start + FILES_PER_UNIT]) for start in range(0, len(paths), FILES_PER_UNIT)]
    return [ReferenceUnit(f"{number:05d}", group, config) for number, group in enumerate(groups)]
