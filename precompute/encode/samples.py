"""A sample on its way through a worker. Each of these is whole once it is made, and does not change.

    raw sample → Decoded, or Rejected → a Cut for each of its buckets → Started → Encoded

A sample that is in one bucket's batch and waits for another's holds only what it still needs: its pixels of that
bucket, and its captions in memory of their own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from torch import Tensor

from precompute.encode.encoders import EncodedCaption
from precompute.input.captions import CleanCaption
from precompute.input.reject import Reject
from precompute.pixels.decode import Picture
from shards.format.buckets import Bucket
from shards.root.writing import Caption

Value = TypeVar("Value")


class Later(Generic[Value]):
    """A value that is waited for when it is first asked for; what it took to get it is let go of then."""

    def __init__(self, wait: Callable[[], Value]):
        self._wait: Callable[[], Value] | None = wait

    def __call__(self) -> Value:
        if self._wait is not None:
            self._value, self._wait = self._wait(), None
        return self._value


@dataclass(frozen=True)
class Rejected:
    """A sample that is not encoded, and why."""

    key: str
    url: str
    reject: Reject


@dataclass(frozen=True)
class About:
    """What is known of a sample besides its pixels."""

    key: str
    url: str
    scores: np.ndarray
    """(4,) float32."""
    captions: list[CleanCaption | None]
    """One for each of the encoding's caption fields."""
    width: int
    height: int
    """Of the original, in pixels."""


@dataclass(frozen=True)
class Decoded:
    """A sample between decoding and batching, its picture cut and scaled for each bucket that it goes to."""

    about: About
    picture: Picture


@dataclass(frozen=True)
class Cut:
    """A sample's part in one bucket's batch."""

    about: About
    pixels: np.ndarray
    """(height, width, 3) uint8."""
    corner: tuple[int, int]
    """The crop's (top, left) in original pixels."""
    num_buckets: int
    """How many buckets' batches the sample is in."""


@dataclass(frozen=True)
class Captions:
    """A sample's captions with their text latents."""

    stored: list[Caption | None]
    finite: bool


@dataclass(frozen=True)
class Encoded:
    """A sample with all of its latents for one bucket, on the CPU."""

    about: About
    bucket: Bucket
    corner: tuple[int, int]
    captions: list[Caption | None]
    image_latents: Tensor
    finite: bool
    """Whether neither overflows float16."""


@dataclass(frozen=True)
class Started:
    """A sample that is on the device."""

    about: About
    corner: tuple[int, int]
    captions: Later[Captions]

    def encoded(self, bucket: Bucket, image_latents: Tensor) -> Encoded:
        """With the latents, waited for."""
        captions = self.captions()
        finite = captions.finite and all_finite(image_latents)
        return Encoded(self.about, bucket, self.corner, captions.stored, image_latents, finite)


@dataclass(frozen=True)
class StartedBatch:
    """Samples of one bucket on the device."""

    bucket: Bucket
    samples: list[Started]
    image_latents: Callable[[], Tensor]
    """Waits for them."""

    def encoded(self) -> Iterator[Encoded]:
        """Wait for the batch; its samples in order."""
        for sample, image_latents in zip(self.samples, self.image_latents(), strict=True):
            yield sample.encoded(self.bucket, image_latents)


def with_latents(clean: list[CleanCaption | None], encoded: list[Callable[[], EncodedCaption] | None]) -> Captions:
    """A sample's clean captions with their text latents, waited for, in memory of their own: what waits for another
    bucket's batch must not hold this batch's page-locked memory."""
    stored: list[Caption | None] = []
    for caption, wait in zip(clean, encoded, strict=True):
        if caption is None or wait is None:
            stored.append(None)
            continue
        text = wait()
        cut = {"truncated"} if text.truncated else set()
        stored.append(Caption(caption.text, text.latents.clone(), text.num_tokens, caption.mended | cut))
    return Captions(stored, all(all_finite(caption.latents) for caption in stored if caption))


def all_finite(latents: Tensor) -> bool:
    """Whether float16 latents hold neither infinities nor NaN: these alone have an exponent of all ones."""
    magnitudes = latents.numpy().view(np.uint16) & 0x7FFF
    return bool(magnitudes.max() < 0x7C00)
