"""The towers of a job: the encoders through which a batch of images and its captions pass."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from precompute.encode.encoders import FeatureEncoder, ImageEncoder, TextEncoder, TowerCaption
from shards.format.buckets import Bucket
from shards.format.text import TextLatents

Result = TypeVar("Result")
PIXELS_PER_BATCH_ITEM = 512 * 512
Timer = Callable[[str], AbstractContextManager[None]]
"""Function from `image`, `texts.NAME` or `features.NAME` to a context manager that times work started in its block."""


def untimed(tower: str) -> AbstractContextManager[None]:
    """Provide a `Timer` that measures nothing."""
    return nullcontext()


def batch_size_of(bucket: Bucket, batch_size: int) -> int:
    """Return a bucket's batch size: `batch_size` for buckets up to 512x512; for larger buckets, as many images as have
    the same total number of pixels."""
    return max(1, batch_size * PIXELS_PER_BATCH_ITEM // max(PIXELS_PER_BATCH_ITEM, bucket.width * bucket.height))


@dataclass(frozen=True)
class PictureLatents:
    """Latents of one image, in float16 on the CPU."""

    image: Tensor
    """(planes, h, w)."""
    features: dict[str, Tensor]
    """Feature tower → (tokens, width)."""


@dataclass(frozen=True)
class CaptionLatents:
    """Latents of one caption from all text towers."""

    latents: dict[str, TextLatents]
    truncated: bool
    """Whether a tower truncated the caption."""

    @classmethod
    def of(cls, by_tower: dict[str, TowerCaption]) -> "CaptionLatents":
        """Combine the results of the towers."""
        return cls(
            {name: by_tower[name].latents for name in sorted(by_tower)},
            any(caption.truncated for caption in by_tower.values()),
        )


WaitForTowers = Callable[[], Iterator[dict[str, TowerCaption]]]
"""Function that waits for the results of some of the towers, by tower, for each caption that was started."""
WaitForCaptions = Callable[[], Iterator[CaptionLatents]]
"""Function that waits for the latents of each caption that was started."""


class TextTowers:
    """Any number of text towers. Every batch is padded to one size."""

    def __init__(
        self,
        texts: dict[str, TextEncoder],
        batch_size: int,
        batch_sizes: dict[str, int] | None = None,
        one_by_one: bool = False,
    ):
        """
        Args:
            batch_sizes: overrides of `batch_size`, by `texts.NAME` or `features.NAME`.
            one_by_one: whether only one tower is on the device at a time.
        """
        self.texts = texts
        self.batch_size = batch_size
        self.batch_sizes = batch_sizes or {}
        self.one_by_one = one_by_one

    @property
    def caption_batch(self) -> int:
        """Number of captions that fill at least one batch in every tower: the largest of the towers' batch sizes."""
        return max((self.size_of(name) for name in self.texts), default=self.batch_size)

    def size_of(self, name: str) -> int:
        """Return the batch size of the text tower `name`."""
        return self.batch_sizes.get(f"texts.{name}", self.batch_size)

    def empty_caption(self) -> dict[str, TextLatents]:
        """Encode the empty caption."""
        return next(self.start_captions([""])()).latents

    def warm_up(self, buckets: Iterable[Bucket] = ()) -> None:
        """Run towers that have not run yet, so that compilation and kernel selection do not count towards a tar."""
        for name, tower in self.texts.items():
            if None not in tower.warm:
                TextTowers({name: tower}, self.batch_size, self.batch_sizes).empty_caption()
                tower.warm.add(None)

    def start_captions(self, texts: list[str], timer: Timer = untimed) -> WaitForCaptions:
        """Start encoding captions; the returned function waits for their latents.

        If towers run one by one, all but the last tower have finished when this returns.
        """
        if self.one_by_one:
            return next(self.start_tower_by_tower([texts], timer))
        wait = self._start(list(self.texts), texts, timer)
        return lambda: map(CaptionLatents.of, wait())

    def start_tower_by_tower(self, groups: list[list[str]], timer: Timer = untimed) -> Iterator[WaitForCaptions]:
        """Encode groups of captions by one tower after another, so that each tower is moved to the device once.

        All towers but the last finish every group. Then the groups are started on the last tower one at a time, as the
        caller iterates. The tower with the largest latents comes last, so that its latents need not be kept in memory.
        """
        names = sorted(self.texts, key=self._numbers_per_caption)
        finished: list[list[dict[str, TowerCaption]]] = [[{} for _ in texts] for texts in groups]
        for name in names[:-1]:
            started = (self._start([name], texts, timer) for texts in groups)
            for group, encoded in zip(finished, one_ahead(started), strict=True):
                for caption, by_tower in zip(group, encoded, strict=True):
                    caption.update(by_tower)
        for texts, group in zip(groups, finished, strict=True):
            yield partial(_merged, group, self._start(names[-1:], texts, timer))

    def _numbers_per_caption(self, name: str) -> int:
        tower = self.texts[name].tower
        return tower.length * tower.width * tower.states + tower.pooled

    def _start(self, names: list[str], texts: list[str], timer: Timer) -> WaitForTowers:
        """Start some of the towers, in batches. The returned function waits for each caption's results by tower."""
        batches: dict[str, list[Callable[[], list[TowerCaption]]]] = {name: [] for name in names}
        for name in names:
            size = self.size_of(name)
            for first in range(0, len(texts), size):
                with timer(f"texts.{name}"):
                    batches[name].append(self.texts[name].start_batch(texts[first : first + size], size))

        def wait() -> Iterator[dict[str, TowerCaption]]:
            rows = {name: chain.from_iterable(batch() for batch in started) for name, started in batches.items()}
            for _ in texts:
                yield {name: next(captions) for name, captions in rows.items()}

        return wait


def _merged(finished: list[dict[str, TowerCaption]], wait: WaitForTowers) -> Iterator[CaptionLatents]:
    """Wait for the last tower, and combine its results with those of the other towers."""
    for caption, by_tower in zip(finished, wait(), strict=True):
        yield CaptionLatents.of(caption | by_tower)


def one_ahead(started: Iterable[Callable[[], Iterable[Result]]]) -> Iterator[list[Result]]:
    """Wait for each item of `started`, but start the next one first, so that the device always has work."""
    waiting: deque[Callable[[], Iterable[Result]]] = deque()
    for wait in started:
        waiting.append(wait)
        if len(waiting) > 1:
            yield list(waiting.popleft()())
    for wait in waiting:
        yield list(wait())


class Towers(TextTowers):
    """One image tower, with text towers and feature towers."""

    def __init__(
        self,
        image: ImageEncoder,
        texts: dict[str, TextEncoder],
        features: dict[str, FeatureEncoder],
        batch_size: int,
        batch_sizes: dict[str, int] | None = None,
        one_by_one: bool = False,
    ):
        """Take the arguments of `TextTowers`, and the image and feature towers."""
        super().__init__(texts, batch_size, batch_sizes, one_by_one)
        self.image, self.features = image, features

    @property
    def device(self) -> torch.device:
        """Device of the towers."""
        return self.image.device

    def warm_up(self, buckets: Iterable[Bucket] = ()) -> None:
        """Run towers that have not run yet, including on an image of each of `buckets`."""
        super().warm_up()
        for bucket in buckets:
            if bucket not in self.image.warm:
                list(self.start_pictures(bucket, [np.zeros((bucket.height, bucket.width, 3), np.uint8)])())
                self.image.warm.add(bucket)

    def start_pictures(
        self, bucket: Bucket, pictures: list[np.ndarray], timer: Timer = untimed
    ) -> Callable[[], Iterator[PictureLatents]]:
        """Start encoding images of `bucket`, (height, width, 3) uint8 each; the returned function waits for their
        latents."""
        batch_size = batch_size_of(bucket, self.batch_size)
        pixels = self.image.stack(pictures, batch_size)
        with timer("image"):
            image = self.image.start_batch(pixels, len(pictures))
        features = {}
        for name in self.features:
            with timer(f"features.{name}"):
                features[name] = list(self._start_features(name, bucket, pixels, len(pictures)))

        def wait() -> Iterator[PictureLatents]:
            encoded = {name: torch.cat([wait() for wait in waits]) for name, waits in features.items()}
            for i, latents in enumerate(image()):
                yield PictureLatents(latents, {name: rows[i] for name, rows in encoded.items()})

        return wait

    def _start_features(self, name: str, bucket: Bucket, pixels: Tensor, count: int) -> Iterator[Callable[[], Tensor]]:
        """Start a feature tower on a batch, in pieces of the tower's own batch size."""
        size = min(len(pixels), batch_size_of(bucket, self.batch_sizes.get(f"features.{name}", self.batch_size)))
        for first in range(0, count, size):
            # the last piece starts earlier and overlaps the previous piece, so that all pieces have the same size
            start = min(first, len(pixels) - size)
            wait = self.features[name].start_batch(pixels[start : start + size], min(count, first + size) - start)
            yield partial(_rows_from, wait, first - start)


def _rows_from(wait: Callable[[], Tensor], first: int) -> Tensor:
    return wait()[first:]
