"""A sample on its way through a worker. Each of these is whole once it is made, and does not change.

    raw sample → Decoded, or Rejected → a Cut for each of its buckets → Started → Encoded

A sample that is in one bucket's batch and waits for another's holds only what it still needs: its pixels of that
bucket, and its captions in memory of their own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from precompute.encode.overlap import Later
from precompute.encode.towers import EncodedCaptions, PictureLatents
from precompute.input.captions import CleanCaption
from precompute.input.reject import Reject
from precompute.pixels.decode import Picture
from shards.format.buckets import Bucket
from shards.root.writing import Caption, Sample


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
    """(scores,) float32."""
    captions: list[CleanCaption | None]
    """One for each of the encoding's caption fields."""
    width: int
    height: int
    """Of the original, in pixels."""
    sha256: str
    """Of the picture's file."""


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
    corner: tuple[int, int]
    captions: list[Caption | None]
    latents: PictureLatents
    finite: bool
    """Whether nothing overflows float16."""

    @property
    def to_store(self) -> Sample:
        """What its part keeps of it."""
        about, latents = self.about, self.latents
        size = (about.width, about.height, *self.corner)
        named = {"url": about.url, "sha256": about.sha256}
        return Sample(about.key, self.captions, latents.image, size, about.scores, latents.features, **named)


@dataclass(frozen=True)
class Started:
    """A sample that is on the device."""

    about: About
    corner: tuple[int, int]
    captions: Later[Captions]

    def encoded(self, latents: PictureLatents) -> Encoded:
        """With the picture's latents, waited for."""
        captions = self.captions()
        finite = captions.finite and all(map(all_finite, (latents.image, *latents.features.values())))
        return Encoded(self.about, self.corner, captions.stored, latents, finite)


@dataclass(frozen=True)
class StartedBatch:
    """Samples of one bucket on the device."""

    bucket: Bucket
    samples: list[Started]
    latents: Callable[[], Iterable[PictureLatents]]
    """Waits for the pictures'."""

    def encoded(self) -> Iterator[Encoded]:
        """Wait for the batch; its samples in order."""
        for sample, latents in zip(self.samples, self.latents(), strict=True):
            yield sample.encoded(latents)


def with_latents(clean: list[CleanCaption | None], encoded: Sequence[Callable[[], EncodedCaptions] | None]) -> Captions:
    """A sample's clean captions with their text latents, waited for, in memory of their own: what waits for another
    bucket's batch must not hold this batch's page-locked memory."""
    stored: list[Caption | None] = []
    for caption, wait in zip(clean, encoded, strict=True):
        if caption is None or wait is None:
            stored.append(None)
            continue
        text = wait()
        cut = {"truncated"} if text.truncated else set()
        latents = {name: of_tower.clone() for name, of_tower in text.latents.items()}
        stored.append(Caption(caption.text, latents, caption.changes | cut))
    made = [latents for caption in stored if caption for latents in caption.latents.values()]
    return Captions(stored, all(all_finite(tensor) for latents in made for tensor in latents.tensors))


def all_finite(latents: Tensor) -> bool:
    """Whether float16 latents hold neither infinities nor NaN: these alone have an exponent of all ones."""
    magnitudes = latents.numpy().view(np.uint16) & 0x7FFF
    return bool(magnitudes.max() < 0x7C00)
