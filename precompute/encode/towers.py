"""All of a job's towers as one: what a batch of pictures and its captions go through."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from precompute.encode.encoders import EncodedCaption, FeatureEncoder, ImageEncoder, TextEncoder
from precompute.encode.overlap import Later
from shards.format.buckets import Bucket
from shards.format.text import TextLatents

PIXELS_PER_BATCH_ITEM = 512 * 512
Waits = dict[str, Callable[[], EncodedCaption]]
"""Tower → waits for what it made of a caption."""
Timer = Callable[[str], AbstractContextManager[None]]
"""`image`, `texts.NAME` or `features.NAME` → what is handed to the device inside counts as that tower's time."""


def untimed(tower: str) -> AbstractContextManager[None]:
    """A `Timer` that counts nothing."""
    return nullcontext()


def batch_size_of(bucket: Bucket, batch_size: int) -> int:
    """`batch_size` holds up to 512x512; a larger bucket's batch has as many pixels."""
    return max(1, batch_size * PIXELS_PER_BATCH_ITEM // max(PIXELS_PER_BATCH_ITEM, bucket.width * bucket.height))


@dataclass(frozen=True)
class PictureLatents:
    """What the towers made of one picture; float16 on the CPU."""

    image: Tensor
    """(planes, h, w)."""
    features: dict[str, Tensor]
    """Feature tower → (tokens, width)."""


class TextTowers:
    """Any number of text towers. Every batch is filled up to one size."""

    one_by_one = False
    """A tower is done with all that waits before the next one begins: they take turns on the device."""

    def __init__(self, texts: dict[str, TextEncoder], batch_size: int, batch_sizes: dict[str, int] | None = None):
        """`batch_sizes`: of towers that have their own, `texts.NAME` or `features.NAME`."""
        self.texts = texts
        self.batch_size = batch_size
        self.batch_sizes = batch_sizes or {}

    @property
    def caption_batch(self) -> int:
        """Captions that make a full batch of every tower: the largest one's."""
        return max((self.size_of(name) for name in self.texts), default=self.batch_size)

    def size_of(self, name: str) -> int:
        """Captions of a batch of the text tower `name`."""
        return self.batch_sizes.get(f"texts.{name}", self.batch_size)

    def empty_caption(self) -> dict[str, TextLatents]:
        """What each makes of no caption."""
        return next(self.start_captions([[""]]))[0]().latents

    def warm_up(self, buckets: Iterable[Bucket] = ()) -> None:
        """Run what was not run yet, so that it is compiled, and its kernels chosen, before a tar's time counts."""
        for name, tower in self.texts.items():
            if None not in tower.warm:
                TextTowers({name: tower}, self.batch_size, self.batch_sizes).empty_caption()
                tower.warm.add(None)

    def start_captions(
        self, groups: list[list[str]], timer: Timer = untimed
    ) -> Iterator[list[Callable[[], "EncodedCaptions"]]]:
        """Begin with groups of captions, one each time; each function returned waits for a caption's latents.

        Where towers run one by one, all but the last are done with all groups before the first comes out. The last is
        that of the most numbers, which so need not be held.
        """
        apart = self.one_by_one and self.texts  # without captions to encode there is one turn, of none
        turns = [[name] for name in sorted(self.texts, key=self._size)] if apart else [list(self.texts)]
        waits = deque([Waits() for _ in texts] for texts in groups)
        for names in turns[:-1]:
            self._finish(names, groups, waits, timer)
        for texts in groups:
            yield self._start_last(turns[-1], texts, waits.popleft(), timer)

    def _size(self, name: str) -> int:
        """Numbers that a tower makes of a caption."""
        tower = self.texts[name].tower
        return tower.length * tower.width * tower.states + tower.pooled

    def _start(
        self, names: list[str], texts: list[str], waits: list[Waits], timer: Timer
    ) -> list[Later[list[EncodedCaption]]]:
        """Have these towers begin with captions, in batches."""
        batches = []
        for name in names:
            size = self.size_of(name)
            for first in range(0, len(texts), size):
                batch = texts[first : first + size]
                with timer(f"texts.{name}"):
                    batches.append(Later(self.texts[name].start_batch(batch, size)))
                for row in range(len(batch)):
                    waits[first + row][name] = partial(_row, batches[-1], row)
        return batches

    def _finish(self, names: list[str], groups: list[list[str]], waits: Iterable[list[Waits]], timer: Timer) -> None:
        """Have these towers encode all groups, a group ahead of the one that is waited for."""
        before: list[Later[list[EncodedCaption]]] = []
        for group in chain(zip(groups, waits, strict=True), [([], [])]):
            begun = self._start(names, *group, timer)
            for batch in before:
                batch()
            before = begun

    def _start_last(
        self, names: list[str], texts: list[str], waits: list[Waits], timer: Timer
    ) -> list[Callable[[], "EncodedCaptions"]]:
        self._start(names, texts, waits, timer)
        return [partial(EncodedCaptions.of, wait) for wait in waits]


class Towers(TextTowers):
    """One image tower, text towers and feature towers."""

    def __init__(
        self,
        image: ImageEncoder,
        texts: dict[str, TextEncoder],
        features: dict[str, FeatureEncoder],
        batch_size: int,
        batch_sizes: dict[str, int] | None = None,
    ):
        super().__init__(texts, batch_size, batch_sizes)
        self.image, self.features = image, features

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.image.device

    def warm_up(self, buckets: Iterable[Bucket] = ()) -> None:
        """As `TextTowers.warm_up`, of pictures of `buckets` too."""
        super().warm_up()
        for bucket in buckets:
            if bucket not in self.image.warm:
                list(self.start_pictures(bucket, [np.zeros((bucket.height, bucket.width, 3), np.uint8)])())
                self.image.warm.add(bucket)

    def start_pictures(
        self, bucket: Bucket, pictures: list[np.ndarray], timer: Timer = untimed
    ) -> Callable[[], Iterator[PictureLatents]]:
        """Begin with pictures of `bucket`, (height, width, 3) uint8 each; the function returned waits for their
        latents."""
        batch_size = batch_size_of(bucket, self.batch_size)
        pixels = self.image.stack(pictures, batch_size)
        with timer("image"):
            image = self.image.start_batch(pixels, len(pictures))
        features = {}
        for name in self.features:
            with timer(f"features.{name}"):
                features[name] = list(self._start_features(name, bucket, pixels, len(pictures)))

        def waited() -> Iterator[PictureLatents]:
            made = {name: torch.cat([wait() for wait in waits]) for name, waits in features.items()}
            for i, latents in enumerate(image()):
                yield PictureLatents(latents, {name: rows[i] for name, rows in made.items()})

        return waited

    def _start_features(self, name: str, bucket: Bucket, pixels: Tensor, count: int) -> Iterator[Callable[[], Tensor]]:
        """Begin with a batch, in pieces of the tower's own batch size."""
        size = min(len(pixels), batch_size_of(bucket, self.batch_sizes.get(f"features.{name}", self.batch_size)))
        for first in range(0, count, size):
            # the last piece begins earlier, so that it is as large as the others
            start = min(first, len(pixels) - size)
            wait = self.features[name].start_batch(pixels[start : start + size], min(count, first + size) - start)
            yield partial(_from, wait, first - start)


@dataclass(frozen=True)
class EncodedCaptions:
    """What each text tower made of one caption, and whether one had to cut it."""

    latents: dict[str, TextLatents]
    truncated: bool

    @classmethod
    def of(cls, waits: Waits) -> "EncodedCaptions":
        """Wait for each tower."""
        encoded = {name: waits[name]() for name in sorted(waits)}
        return cls(
            {name: caption.latents for name, caption in encoded.items()},
            any(caption.truncated for caption in encoded.values()),
        )


def _row(encoded: Callable[[], list[EncodedCaption]], row: int) -> EncodedCaption:
    return encoded()[row]


def _from(wait: Callable[[], Tensor], first: int) -> Tensor:
    return wait()[first:]
