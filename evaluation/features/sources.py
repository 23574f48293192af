"""Where pictures come from, in units: parts of a sample set, tars, files of a folder.

A reference's pictures go through stage 1's own pixel path, whatever they are in: a model is held against pictures that
were cut and scaled as those that it was trained on.
"""

import hashlib
import io
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image
from pydantic import Field, field_validator, model_validator

from evaluation.parts import Receipt, read_part
from evaluation.sampling.job import SampleSet
from precompute.encode.overlap import Stuck, threads
from precompute.input.layout import IMAGE_SUFFIXES
from precompute.input.reject import Reject
from precompute.input.tars import InputTar, Tar, counted_samples, list_tars, local_copy
from precompute.pixels.decode import LimitsConfig, Picture, PixelsConfig, decode
from precompute.pixels.isolation import CLOCK_PER_PROCESSOR_SECOND, Isolated
from shards.base.config import Config
from shards.base.errors import RequestError
from shards.base.store import Place
from shards.format.buckets import Bucket, BucketName
from shards.open import open_store

FILES_PER_UNIT = 500
Decode = Callable[..., Picture]
"""The signature of `precompute.pixels.decode.decode`."""
WHICH_PICTURES = {"formats", "max_pixels", "max_side", "max_bytes"}
"""Limits that decide which pictures are in a reference."""


class ReferenceConfig(Config):
    """The pictures that a model's are held against."""

    place: Place | None = None
    """Where its features are kept, or are to be: a folder or an address."""
    pictures: str | None = None
    """A folder or address of tars, or a folder of pictures; null: the features are there already."""
    moments: Path | None = None
    """In place of both: an npz of `mu` and `sigma`, as pytorch-fid and MLPerf have them. It is good for Fréchet
    distances at N alone."""
    size: BucketName = "512x512"
    """WIDTHxHEIGHT in pixels, that of the samples. Smaller pictures are left out."""
    pixels: PixelsConfig = PixelsConfig()
    limits: LimitsConfig = LimitsConfig()
    batch_size: int = Field(64, ge=1)
    """Pictures at a time."""

    @field_validator("pictures")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        # the record at `place` names the pictures: one folder must have one name, whatever the working directory
        return value if value is None or "://" in value else str(Path(value).absolute())

    @model_validator(mode="after")
    def one_of_both(self) -> Self:
        if self.moments is not None and self.pictures is not None:
            raise ValueError("moments take the place of a reference's pictures: give moments or pictures")
        return self

    def record(self) -> dict[str, Any]:
        """How pictures become pixels, and which do."""
        pixels = self.pixels
        own = {"size": self.size, "decoder": pixels.decoder, "resampling": pixels.resampling, "crop": pixels.crop}
        return own | {"limits": self.limits.model_dump(mode="json", include=WHICH_PICTURES)}


@dataclass
class Taken:
    """What a unit was found to hold."""

    input: str = ""
    """SHA-256 of its bytes."""
    rejected: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class SampleUnit:
    """A committed part of a sample set."""

    name: str
    place: Path | str
    receipt: Receipt
    texts: tuple[str, ...]
    """Its prompts, one for each picture."""

    def pictures(self, taken: Taken, isolate: bool = False) -> Generator[np.ndarray, None, None]:
        """Yield the pictures, (height, width, 3) uint8, in order.

        `isolate` has no effect, because `sample` itself wrote these files.
        """
        files = read_part(open_store(self.place), self.receipt)
        taken.input = hashlib.sha256("".join(self.receipt["files"].values()).encode()).hexdigest()
        for data in files.values():
            yield np.asarray(Image.open(io.BytesIO(data), formats=["PNG", "WEBP"]))


@dataclass(frozen=True)
class TarUnit:
    name: str
    tar: InputTar
    config: ReferenceConfig
    decode: Decode = decode

    def pictures(self, taken: Taken, isolate: bool = False) -> Generator[np.ndarray, None, None]:
        """Yield the valid pictures that are large enough, (height, width, 3) uint8, in the tar's order.

        With `isolate`, a child process decodes them, and a picture that crashes it or never ends is rejected as
        `decoder_crash`.

        Raises:
            Stuck: a picture was decoded in a thread and did not end, so this process must.
        """
        limits = self.config.limits
        with local_copy(self.tar.address, ".tar") as path, _decoding(self.decode, limits, isolate) as decode:
            tar = Tar(path, limits.max_bytes)
            tar.check(self.tar, counted_samples(self.tar))
            taken.input = tar.sha256
            for sample in tar.samples():
                yield from _cut(sample.image, self.config, taken, decode)


@dataclass(frozen=True)
class FilesUnit:
    name: str
    paths: tuple[Path, ...]
    config: ReferenceConfig
    decode: Decode = decode

    def pictures(self, taken: Taken, isolate: bool = False) -> Generator[np.ndarray, None, None]:
        """Yield pictures in the files' order. Isolation, shapes and errors are those of `TarUnit.pictures`."""
        digest = hashlib.sha256()
        with _decoding(self.decode, self.config.limits, isolate) as decode:
            for path in self.paths:
                data = path.read_bytes()
                digest.update(hashlib.sha256(data).digest())
                yield from _cut(data, self.config, taken, decode)
        taken.input = digest.hexdigest()


Unit = SampleUnit | TarUnit | FilesUnit


def sample_units(found: SampleSet) -> list[SampleUnit]:
    texts = {prompt.id: prompt.text for prompt in found.prompts}
    return [
        SampleUnit(name, found.place, receipt, tuple(texts[prompt_id] for prompt_id, _ in receipt["samples"]))
        for name, receipt in found.parts.items()
    ]


def reference_units(config: ReferenceConfig) -> list[TarUnit] | list[FilesUnit]:
    """The tars of a reference, or its files by 500.

    Raises:
        RequestError: there are neither.
    """
    assert config.pictures is not None
    folder = Path(config.pictures).absolute()
    if "://" in config.pictures or any(folder.glob("*.tar")):
        return [TarUnit(tar.name, tar, config) for tar in list_tars(config.pictures)]
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower().lstrip(".") in IMAGE_SUFFIXES)
    if not paths:
        raise RequestError(f"{folder} holds neither tars nor pictures. Set reference.pictures to a folder of either.")
    starts = range(0, len(paths), FILES_PER_UNIT)
    return [
        FilesUnit(f"{number:05d}", tuple(paths[start : start + FILES_PER_UNIT]), config)
        for number, start in enumerate(starts)
    ]


@contextmanager
def _decoding(decode: Decode, limits: LimitsConfig, isolate: bool) -> Iterator[Decode]:
    """Provide `decode` with a time limit: in a child process if `isolate`, otherwise in a thread."""
    if isolate:
        with Isolated(decode, limits) as isolated:
            yield isolated
        return
    seconds = CLOCK_PER_PROCESSOR_SECOND * limits.decode_seconds
    with threads(1, seconds) as pool:

        def in_time(*args: Any) -> Picture:
            future = pool.submit(decode, *args)
            try:
                future.exception(seconds)
            except TimeoutError:
                raise Stuck(f"decoding a picture took more than {seconds} s") from None
            return future.result()

        yield in_time


def _cut(data: bytes | None, config: ReferenceConfig, taken: Taken, decode: Decode) -> Iterator[np.ndarray]:
    bucket = Bucket.parse(config.size)
    try:
        if data is None:
            raise Reject("no_image", "the sample has no picture")
        yield decode(data, [bucket], config.pixels, config.limits).pixels[bucket]
    except Reject as reject:
        taken.rejected[reject.reason] += 1
