"""The towers of a job: the encoders that a batch of images and its captions pass through."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from precompute.encode.encoders import FeatureEncoder, ImageEncoder, TextEncoder, TowerCaption
from shards.base.device import device_module, is_accelerator
from shards.format.buckets import Bucket
from shards.format.text import TextLatents
from shards.root.provenance import Stopwatch

PIXELS_PER_BATCH_ITEM = 512 * 512
Timer = Callable[[str], AbstractContextManager[object]]
"""Function that takes the name of a tower (`image`, `texts.NAME` or `features.NAME`), and returns a context manager
that times the work started in its block."""


class DeviceClock:
    """Clock for the device time of each tower, measured with events on a GPU and as the duration of calls on a CPU."""

    def __init__(self, device: torch.device, stopwatch: Stopwatch):
        self.is_accelerator, self.stopwatch = is_accelerator(device), stopwatch
        self.begun: list[tuple[str, Any, Any]] = []

    @contextmanager
    def __call__(self, tower: str) -> Iterator[None]:
        """Add the device time of work started in the block to the total for `tower`: `image`, `texts.NAME` or
        `features.NAME`."""
        stage = f"device.{tower}"
        if not self.is_accelerator:
            with self.stopwatch(stage):
                yield
            return
        begin, end = (device_module().Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self.begun.append((stage, begin, end))

    def stop(self) -> None:
        """Add the device time of all batches, in seconds, to the stopwatch: `device.TOWER` for each tower, and `device`
        for their sum. Waits for batches that have not finished."""
        seconds = self.stopwatch.seconds
        for stage, begin, end in self.begun:
            end.synchronize()
            seconds[stage] += begin.elapsed_time(end) / 1000
        seconds["device"] = sum(spent for stage, spent in seconds.items() if stage.startswith("device."))


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


CaptionLatents = tuple[dict[str, TextLatents], bool]
"""Latents of one caption, by text tower, and whether any tower truncated the caption."""
WaitForCaptions = Callable[[], Iterator[CaptionLatents]]
"""Function that waits for captions that were started, and yields the latents of each."""


@dataclass(eq=False)
class TextTowers:
    """Any number of text towers. All batches of a tower are padded to the same size."""

    texts: dict[str, TextEncoder]
    batch_size: int
    batch_sizes: dict[str, int] = field(default_factory=dict)
    """Overrides of `batch_size`, by `texts.NAME` or `features.NAME`."""
    one_by_one: bool = False
    """Whether only one tower is on the device at a time."""

    @property
    def caption_batch(self) -> int:
        """Number of captions that fill at least one batch in every tower: the largest of the towers' batch sizes."""
        return max((self.size_of(name) for name in self.texts), default=self.batch_size)

    def size_of(self, name: str) -> int:
        """Return the batch size of the text tower `name`."""
        return self.batch_sizes.get(f"texts.{name}", self.batch_size)

    def empty_caption(self) -> dict[str, TextLatents]:
        """Encode the empty caption, and return its latents by tower."""
        return next(self.start_captions([""])())[0]

    def warm_up(self, buckets: Iterable[Bucket] = ()) -> None:
        """Run the towers that have not run yet, so that no tar's time includes compilation and kernel selection."""
        for name, tower in self.texts.items():
            if None not in tower.warm:
                TextTowers({name: tower}, self.batch_size, self.batch_sizes).empty_caption()
                tower.warm.add(None)

    def start_captions(self, texts: list[str], timer: Timer = nullcontext) -> WaitForCaptions:
        """Start encoding captions; the returned function waits for their latents. If towers run one by one, all but the
        last tower have finished when this function returns."""
        return next(self.start_groups([texts], timer))

    def start_groups(self, groups: list[list[str]], timer: Timer = nullcontext) -> Iterator[WaitForCaptions]:
        """Start encoding groups of captions, one group at a time, as the caller iterates.

        If towers run one by one, every tower but the last one finishes all groups first, so that each tower is moved to
        the device once. The tower with the largest latents comes last, so that its latents need not be kept in memory.
        """
        names = sorted(self.texts, key=self._numbers_per_caption)
        num_first = len(names[:-1]) if self.one_by_one else 0
        finished: list[list[dict[str, TowerCaption]]] = [[{} for _ in texts] for texts in groups]
        for name in names[:num_first]:
            started = (self._start([name], texts, timer) for texts in groups)
            # wait for each group once the next one has been started, so that the device always has work
            for group, (wait, _) in zip(finished, pairwise(chain(started, [None])), strict=True):
                assert wait is not None
                for caption, by_tower in zip(group, wait(), strict=True):
                    caption.update(by_tower)
        for texts, group in zip(groups, finished, strict=True):
            yield partial(_merged, group, self._start(names[num_first:], texts, timer))

    def _numbers_per_caption(self, name: str) -> int:
        tower = self.texts[name].tower
        return tower.length * tower.width * tower.states + tower.pooled

    def _start(
        self, names: list[str], texts: list[str], timer: Timer
    ) -> Callable[[], Iterator[dict[str, TowerCaption]]]:
        """Start encoding `texts`, in batches, with the towers in `names`. The returned function waits for the results,
        and yields each caption's results by tower."""
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


def _merged(
    finished: list[dict[str, TowerCaption]], wait: Callable[[], Iterator[dict[str, TowerCaption]]]
) -> Iterator[CaptionLatents]:
    """Wait for the last towers, and combine their results with those of the other towers."""
    for others, last in zip(finished, wait(), strict=True):
        by_tower = sorted((others | last).items())
        yield {name: caption.latents for name, caption in by_tower}, any(caption.truncated for _, caption in by_tower)


@dataclass(eq=False, kw_only=True)
class Towers(TextTowers):
    """One image tower, with text towers and feature towers."""

    image: ImageEncoder
    features: dict[str, FeatureEncoder]

    @property
    def device(self) -> torch.device:
        """Device of the towers."""
        return self.image.device

    def warm_up(self, buckets: Iterable[Bucket] = ()) -> None:
        """Run each tower that has not run yet; the image tower runs on one image per bucket in `buckets`."""
        super().warm_up()
        for bucket in buckets:
            if bucket not in self.image.warm:
                list(self.start_pictures(bucket, [np.zeros((bucket.height, bucket.width, 3), np.uint8)])())
                self.image.warm.add(bucket)

    def start_pictures(
        self, bucket: Bucket, pictures: list[np.ndarray], timer: Timer = nullcontext
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
