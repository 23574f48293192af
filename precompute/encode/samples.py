"""A sample at each stage of a worker:

    raw sample → DecodedSample (or Rejected) → CroppedSample for each of its buckets → EncodedSample

A sample that has been encoded for one bucket and is still waiting for another bucket's batch keeps
only its pixels for the latter and its encoded captions, in separate memory.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from precompute.encode.towers import CaptionLatents, PictureLatents
from precompute.input.captions import CleanCaption
from precompute.input.reject import Reject
from precompute.pixels.decode import Picture
from shards.format.buckets import Bucket
from shards.root.writing import Caption, Sample


@dataclass(frozen=True)
class Rejected:
    """A sample that is not encoded, and the reason."""

    key: str
    url: str
    reject: Reject


@dataclass(frozen=True)
class SampleInfo:
    """A sample without its pixels."""

    key: str
    url: str
    scores: np.ndarray
    """(scores,) float32."""
    captions: list[CleanCaption | None]
    """One entry per caption field of the encoding; None for a caption that the sample lacks."""
    width: int
    height: int
    """Size of the original image in pixels."""
    sha256: str
    """Hash of the image file."""


@dataclass(frozen=True)
class DecodedSample:
    """A sample with its image decoded, cropped and resized for each of its buckets."""

    info: SampleInfo
    picture: Picture


@dataclass(frozen=True)
class EncodedCaption:
    """A caption as it is stored."""

    stored: Caption
    finite: bool
    """Whether all of its latents are finite in float16."""


@dataclass(eq=False)
class CaptionTask:
    """A caption that is encoded once, for all buckets of its sample."""

    caption: CleanCaption
    is_queued: bool = False
    encoded: Future[EncodedCaption] = field(default_factory=Future)
    """Future of the result; it is running once the encoders have received the caption."""

    @property
    def is_started(self) -> bool:
        """Whether the encoders have received or finished the caption."""
        return self.encoded.running() or self.encoded.done()

    def finish(self, encoded: CaptionLatents) -> None:
        """Set the result.

        The latents are copied. Otherwise, a sample waiting for another bucket's batch would keep the page-locked memory
        of this whole batch of captions.
        """
        latents = {name: of_tower.clone() for name, of_tower in encoded.latents.items()}
        changes = self.caption.changes | ({"truncated"} if encoded.truncated else set())
        finite = all(all_finite(tensor) for of_tower in latents.values() for tensor in of_tower.tensors)
        self.encoded.set_result(EncodedCaption(Caption(self.caption.text, latents, changes), finite))


@dataclass(frozen=True)
class EncodedSample:
    """A sample with all of its latents for one bucket, on the CPU."""

    info: SampleInfo
    corner: tuple[int, int]
    captions: list[Caption | None]
    latents: PictureLatents
    finite: bool
    """Whether all latents are finite in float16."""

    @property
    def to_store(self) -> Sample:
        """The sample in the form that its part stores."""
        info, latents = self.info, self.latents
        size = (info.width, info.height, *self.corner)
        origin = {"url": info.url, "sha256": info.sha256}
        return Sample(info.key, self.captions, latents.image, size, info.scores, latents.features, **origin)


@dataclass(frozen=True)
class CroppedSample:
    """A sample in one bucket's batch, without its pixels."""

    info: SampleInfo
    captions: list[CaptionTask | None]
    """Shared by the sample's buckets."""
    corner: tuple[int, int]
    """(top, left) of the crop in pixels of the original image."""

    def encoded(self, latents: PictureLatents) -> EncodedSample:
        """Combine the image's latents with those of the captions, which must be finished."""
        captions = [None if task is None else task.encoded.result(timeout=0) for task in self.captions]
        finite = all(caption is None or caption.finite for caption in captions)
        finite = finite and all(map(all_finite, (latents.image, *latents.features.values())))
        stored = [None if caption is None else caption.stored for caption in captions]
        return EncodedSample(self.info, self.corner, stored, latents, finite)


@dataclass
class PixelBatch:
    """Samples of one bucket that are encoded together."""

    bucket: Bucket
    samples: list[CroppedSample] = field(default_factory=list)
    pixels: list[np.ndarray] = field(default_factory=list)
    """(height, width, 3) uint8 each."""


@dataclass
class StartedBatch:
    """Samples of one bucket whose images the encoders have received."""

    bucket: Bucket
    samples: list[CroppedSample]
    latents: Callable[[], Iterator[PictureLatents]]
    """Function that waits for the images' latents."""
    finish_captions: list[Callable[[], None]] = field(default_factory=list)
    """Functions to call before this batch's captions are used; each waits for one batch of captions."""

    @property
    def is_ready(self) -> bool:
        """Whether all captions of the batch have been started."""
        return all(task is None or task.is_started for sample in self.samples for task in sample.captions)

    def finish_pictures(self) -> None:
        """Wait for the images' latents, and release their pixels."""
        latents = list(self.latents())
        self.latents = lambda: iter(latents)

    def encoded(self) -> list[EncodedSample]:
        """Wait for the batch, and return its encoded samples."""
        for finish in self.finish_captions:
            finish()
        self.finish_captions.clear()
        return [sample.encoded(latents) for sample, latents in zip(self.samples, self.latents(), strict=True)]


def all_finite(latents: Tensor) -> bool:
    """Return whether float16 latents contain no infinities or NaNs, whose exponent bits are all ones."""
    magnitudes = latents.numpy().view(np.uint16) & 0x7FFF
    return bool(magnitudes.max() < 0x7C00)
