"""A sample at each stage of a worker:

    raw sample → DecodedSample (or Rejected) → CroppedSample for each of its buckets → Sample (shards.root.writing)

While a sample that has been encoded for one bucket waits for another bucket's batch, it keeps only its pixels for that
bucket and a copy of its encoded captions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from precompute.encode.towers import CaptionLatents, PictureLatents, WaitForCaptions
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


@dataclass(eq=False)
class CaptionTask:
    """A caption that is encoded once, for all buckets of its sample."""

    caption: CleanCaption
    is_queued: bool = False
    wait: Callable[[], None] | None = None
    """Function that waits for all captions of the same batch; None if the encoders have not received the caption, or
    have already finished it."""
    encoded: Caption | None = None
    """The caption as it is stored."""

    @property
    def is_started(self) -> bool:
        """Whether the encoders have received or finished the caption."""
        return self.wait is not None or self.encoded is not None  # order matters: `finish` runs in another thread

    def result(self) -> Caption:
        """Return `encoded`, after waiting for it if necessary."""
        if self.wait is not None:
            self.wait()
        assert self.encoded is not None, "the caption has not been started"
        return self.encoded

    def finish(self, encoded: CaptionLatents) -> None:
        """Set the result. The latents are copied, because otherwise a sample that waits for another bucket's batch
        would keep the page-locked memory of its whole batch of captions."""
        by_tower, truncated = encoded
        latents = {name: of_tower.clone() for name, of_tower in by_tower.items()}
        changes = self.caption.changes | ({"truncated"} if truncated else set())
        self.encoded, self.wait = Caption(self.caption.text, latents, changes), None


def set_started(tasks: list[CaptionTask], wait: WaitForCaptions) -> None:
    """Record that the encoders have received captions, whose latents `wait` returns."""

    def finish() -> None:
        for task, encoded in zip(tasks, wait(), strict=True):
            task.finish(encoded)

    for task in tasks:
        task.wait = finish


@dataclass(frozen=True)
class SampleInfo:
    """A sample without its pixels."""

    key: str
    url: str
    scores: np.ndarray
    """(scores,) float32."""
    captions: list[CaptionTask | None]
    """One entry per caption field of the encoding, shared by the sample's buckets; None for a caption that the sample
    lacks."""
    width: int
    height: int
    """Size of the original image in pixels."""
    sha256: str
    """Hash of the image file."""
    license: str = ""
    """Licence of the image, as the input states it."""


@dataclass(frozen=True)
class DecodedSample:
    """A sample with its image decoded, cropped and resized for each of its buckets."""

    info: SampleInfo
    picture: Picture


@dataclass(frozen=True)
class CroppedSample:
    """A sample in one bucket's batch, without its pixels."""

    info: SampleInfo
    corner: tuple[int, int]
    """(top, left) of the crop in pixels of the original image."""

    def encoded(self, latents: PictureLatents) -> Sample:
        """Wait for the captions, and return the sample as it is stored."""
        info = self.info
        captions = [None if task is None else task.result() for task in info.captions]
        size = (info.width, info.height, *self.corner)
        about = {"url": info.url, "sha256": info.sha256, "license": info.license}
        return Sample(info.key, captions, latents.image, size, info.scores, latents.features, **about)


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

    @property
    def is_ready(self) -> bool:
        """Whether all captions of the batch have been started."""
        return all(task is None or task.is_started for sample in self.samples for task in sample.info.captions)

    def finish_pictures(self) -> None:
        """Wait for the images' latents, and release their pixels."""
        latents = list(self.latents())
        self.latents = lambda: iter(latents)

    def encoded(self) -> list[Sample]:
        """Wait for the batch, and return its samples as they are stored."""
        return [sample.encoded(latents) for sample, latents in zip(self.samples, self.latents(), strict=True)]
