"""Samples between decoding and writing: captions are encoded once for all buckets, in full batches, and no sample keeps
memory longer than it must."""

import gc
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from precompute.encode.encoders import TowerCaption
from precompute.encode.overlap import Turns
from precompute.encode.samples import CaptionTask, CroppedSample, PixelBatch, SampleInfo, StartedBatch
from precompute.encode.stages import start_batches
from precompute.encode.towers import DeviceClock, TextTowers, Towers, batch_size_of
from precompute.input.captions import CleanCaption
from shards.format.buckets import Bucket
from shards.format.text import TextLatents
from shards.format.towers import ONLY_TEXT
from shards.root.provenance import Stopwatch

CLOCK = DeviceClock(torch.device("cpu"), Stopwatch())
SMALL, LARGE = Bucket(8, 8), Bucket(16, 16)


@dataclass
class FakeTower:
    """Sizes of a text tower's latents."""

    length: int = 2
    width: int = 2
    states: bool = True
    pooled: int = 0


class FakeText:
    """Replacement for `TextEncoder`. Each batch is one tensor, like page-locked memory."""

    def __init__(self, tower: FakeTower | None = None) -> None:
        self.tower = tower or FakeTower()
        self.calls: list[list[str]] = []
        self.batches: list[weakref.ref[torch.Tensor]] = []

    def start_batch(self, texts: list[str], batch_size: int) -> Callable[[], list[TowerCaption]]:
        self.calls.append(texts)
        states = torch.ones(len(texts), 2, 2, dtype=torch.float16)
        self.batches.append(weakref.ref(states))
        return lambda: [TowerCaption(TextLatents(row, 2), False) for row in states]


class FakeImages:
    """Replacement for `ImageEncoder`."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.batches: list[weakref.ref[torch.Tensor]] = []
        self.num_finished = 0

    def stack(self, pictures: list[np.ndarray], batch_size: int) -> torch.Tensor:
        return torch.zeros(batch_size, *pictures[0].shape)

    def start_batch(self, pixels: torch.Tensor, count: int) -> Callable[[], torch.Tensor]:
        self.batches.append(weakref.ref(pixels))

        def wait() -> torch.Tensor:
            self.num_finished += 1
            return torch.zeros(len(pixels), 8, 1, 1, dtype=torch.float16)[:count]

        return wait


def sample(key: str, *captions: str | None) -> CroppedSample:
    tasks = [None if text is None else CaptionTask(CleanCaption(text, frozenset())) for text in captions]
    return CroppedSample(SampleInfo(key, "", np.zeros(4, np.float32), tasks, 64, 64, ""), (0, 0))


def batch(bucket: Bucket, *samples: CroppedSample) -> PixelBatch:
    return PixelBatch(bucket, list(samples), [np.zeros((8, 8, 3), np.uint8) for _ in samples])


def make_towers(text: FakeText, batch_size: int, one_by_one: bool = False) -> Towers:
    return Towers({ONLY_TEXT: text}, batch_size, {}, one_by_one, image=FakeImages(), features={})  # type: ignore


def texts_of(started: StartedBatch) -> list[list[str | None]]:
    return [[caption.text if caption else None for caption in stored.captions] for stored in started.encoded()]


def test_captions_are_encoded_once_for_all_buckets_and_hold_no_batch() -> None:
    text = FakeText()
    a, b, c = sample("a", "a0", None), sample("b", "b0", "b1"), sample("c", "c0", None)
    batches = (each for each in [batch(SMALL, a, b), batch(LARGE, c, a)])
    first, second = start_batches(batches, make_towers(text, batch_size=2), CLOCK, Turns())
    assert text.calls == [["a0", "b0"], ["b1", "c0"]]
    assert texts_of(first) == [["a0", None], ["b0", "b1"]]
    assert texts_of(second) == [["c0", None], ["a0", None]]
    del first, second
    gc.collect()  # all were waited for: samples keep copies of their captions, and not the batches
    assert all(of_batch() is None for of_batch in text.batches)
    assert all(task.result().latents for each in (a, b, c) for task in each.info.captions if task)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_the_captions_of_all_buckets_go_in_full_batches(one_by_one: bool) -> None:
    """A third of the images of a tar are in the large bucket, too. Each batch waits for its captions."""
    text, size, large = FakeText(), 4, [number for number in range(50) if number % 3 == 0]
    towers = make_towers(text, size, one_by_one)

    def batches() -> Generator[PixelBatch, None, None]:
        waiting = {SMALL: batch(SMALL), LARGE: batch(LARGE)}
        for number in range(50):
            each = sample(f"{number:02d}", f"caption {number}")
            for bucket in (SMALL, LARGE) if number in large else (SMALL,):
                waiting[bucket].samples.append(each)
                waiting[bucket].pixels.append(np.zeros((8, 8, 3), np.uint8))
                if len(waiting[bucket].samples) == size:
                    yield waiting[bucket]
                    waiting[bucket] = batch(bucket)
        yield from waiting.values()

    seen: dict[Bucket, list[str]] = {SMALL: [], LARGE: []}
    for started in start_batches(batches(), towers, CLOCK, Turns()):
        for stored in started.encoded():
            (caption,) = stored.present
            assert caption.text == f"caption {int(stored.key)}"
            seen[started.bucket].append(stored.key)
    assert list(map(len, text.calls)) == [4] * 12 + [2]
    assert sorted(caption for call in text.calls for caption in call) == sorted(
        f"caption {number}" for number in range(50)
    )
    assert seen[SMALL] == [f"{number:02d}" for number in range(50)]
    assert seen[LARGE] == [f"{number:02d}" for number in large]


def test_captions_are_started_as_soon_as_they_fill_a_batch() -> None:
    taken: list[str] = []

    def batches() -> Generator[PixelBatch, None, None]:
        for key in ("a", "b"):
            taken.append(key)
            yield batch(SMALL, sample(key, "text"))

    next(start_batches(batches(), make_towers(FakeText(), 1), CLOCK, Turns()))
    assert taken == ["a"]


def test_the_tower_with_the_largest_latents_is_last() -> None:
    sizes = {"c": (9, 9, False, 14), "b": (1, 15, True, 0), "a": (2, 7, True, 2)}  # 14, 15 and 16 numbers
    started: list[str] = []

    @contextmanager
    def timer(name: str) -> Iterator[None]:
        started.append(name)
        yield

    texts = {name: FakeText(FakeTower(*size)) for name, size in sizes.items()}
    TextTowers(texts, 8, one_by_one=True).start_captions(["text"], timer)  # type: ignore[arg-type]
    assert started == ["texts.c", "texts.b", "texts.a"]


@pytest.mark.parametrize(
    ("bucket", "batch_size", "expected"),
    [("64x64", 64, 64), ("512x512", 64, 64), ("1024x512", 64, 32), ("1024x1024", 63, 15), ("2048x2048", 8, 1)],
)
def test_batches_of_large_images_have_as_many_pixels(bucket: str, batch_size: int, expected: int) -> None:
    assert batch_size_of(Bucket.parse(bucket), batch_size) == expected


def test_one_by_one_keeps_the_pixels_of_two_batches_and_finishes_them_before_captions() -> None:
    text = FakeText()
    towers, start = make_towers(text, 2, one_by_one=True), text.start_batch
    alive: list[int] = []

    def start_batch(texts: list[str], batch_size: int) -> Callable[[], list[TowerCaption]]:
        assert towers.image.num_finished == 6  # type: ignore[attr-defined]
        return start(texts, batch_size)

    def batches() -> Generator[PixelBatch, None, None]:
        for number in range(6):
            gc.collect()
            alive.append(sum(of_batch() is not None for of_batch in towers.image.batches))  # type: ignore[attr-defined]
            yield batch(SMALL, sample(f"{number}", "text"))

    text.start_batch = start_batch  # type: ignore[method-assign]
    assert len([started.encoded() for started in start_batches(batches(), towers, CLOCK, Turns())]) == 6
    assert max(alive) == 1
