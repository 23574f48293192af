"""What a sample holds on its way: captions that are encoded once for all buckets, and nothing longer than it must."""

import gc
import weakref
from collections.abc import Callable, Generator

import numpy as np
import torch

from precompute.encode.encoders import EncodedCaption
from precompute.encode.overlap import Later, Turns
from precompute.encode.provenance import DeviceClock
from precompute.encode.samples import About, Cut
from precompute.encode.stages import CaptionsOnce, start_batches
from precompute.encode.towers import Towers, untimed
from precompute.input.captions import CleanCaption
from shards.format.buckets import Bucket
from shards.format.text import TextLatents
from shards.root.provenance import Stopwatch


class Text:
    """Stands in for `TextEncoder`: each batch is one tensor, as page-locked memory is."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.batches: list[weakref.ref[torch.Tensor]] = []

    def start_batch(self, texts: list[str], batch_size: int) -> Callable[[], list[EncodedCaption]]:
        self.calls.append(texts)
        states = torch.ones(len(texts), 2, 2, dtype=torch.float16)
        self.batches.append(weakref.ref(states))
        return lambda: [EncodedCaption(TextLatents(row, 2), False) for row in states]


class Pictures:
    """Stands in for `ImageEncoder`."""

    def stack(self, pictures: list[np.ndarray], batch_size: int) -> torch.Tensor:
        return torch.zeros(batch_size, *pictures[0].shape)

    def start_batch(self, pixels: torch.Tensor, count: int) -> Callable[[], torch.Tensor]:
        return lambda: torch.zeros(count, 8, 1, 1, dtype=torch.float16)


def cut(key: str, captions: list[str | None], num_buckets: int) -> Cut:
    clean = [None if text is None else CleanCaption(text, frozenset()) for text in captions]
    about = About(key, "", np.zeros(4, np.float32), clean, 64, 64, "")
    return Cut(about, np.zeros((8, 8, 3), np.uint8), (0, 0), num_buckets)


def test_a_value_is_waited_for_once_and_what_it_took_is_let_go_of() -> None:
    held = torch.ones(3)
    seen, calls = weakref.ref(held), []

    def wait(tensor: torch.Tensor = held) -> float:
        calls.append(1)
        return float(tensor.sum())

    later = Later(wait)
    del wait, held
    assert (later(), later(), calls) == (3.0, 3.0, [1])
    gc.collect()
    assert seen() is None


def test_captions_are_begun_once_for_all_buckets_and_kept_until_the_last() -> None:
    text = Text()
    captions = CaptionsOnce(Towers(None, {"text": text}, {}, batch_size=2), untimed)  # type: ignore
    one = captions.start([cut("a", ["a0", None], 2), cut("b", ["b0", "b1"], 1)])
    assert text.calls == [["a0", "b0"]] and list(captions.begun) == ["a"]
    assert (captions.num_asked, captions.num_begun) == (3, 2)
    two = captions.start([cut("c", ["c0", None], 1), cut("a", ["a0", None], 2)])
    assert text.calls[1:] == [["b1", "c0"]] and captions.begun == {}
    assert two[1] is one[0]
    assert [[caption and caption.text for caption in later().stored] for later in (*one, two[0])] == [
        ["a0", None],
        ["b0", "b1"],
        ["c0", None],
    ]
    gc.collect()  # all were waited for: no batch is held, though the captions are
    assert all(batch() is None for batch in text.batches) and one[0]().finite


def test_the_captions_of_all_buckets_go_in_full_batches() -> None:
    """As in a tar of which a third of the pictures are in the large bucket too; each batch waits for its captions."""
    text, size, large = Text(), 4, [number for number in range(50) if number % 3 == 0]
    towers = Towers(Pictures(), {"text": text}, {}, batch_size=size)  # type: ignore

    def batches() -> Generator[tuple[Bucket, list[Cut]], None, None]:
        waiting: dict[Bucket, list[Cut]] = {Bucket(8, 8): [], Bucket(16, 16): []}
        for number in range(50):
            sample = cut(f"{number:02d}", [f"caption {number}"], 2 if number in large else 1)
            for bucket, batch in waiting.items():
                if bucket.width == 8 or number in large:
                    batch.append(sample)
                    if len(batch) == size:
                        waiting[bucket] = []
                        yield bucket, batch
        yield from waiting.items()

    seen: dict[Bucket, list[str | None]] = {Bucket(8, 8): [], Bucket(16, 16): []}
    for batch in start_batches(batches(), towers, DeviceClock(torch.device("cpu"), Stopwatch()), Turns()):
        for sample in batch.samples:
            caption = sample.captions().stored[0]
            assert caption is not None and caption.text == f"caption {int(sample.about.key)}"
            seen[batch.bucket].append(sample.about.key)
    assert list(map(len, text.calls)) == [4] * 12 + [2]
    assert sorted(caption for call in text.calls for caption in call) == sorted(
        f"caption {number}" for number in range(50)
    )
    assert seen[Bucket(8, 8)] == [f"{number:02d}" for number in range(50)]
    assert seen[Bucket(16, 16)] == [f"{number:02d}" for number in large]
