"""What a sample holds on its way: captions that are encoded once for all buckets, and nothing longer than it must."""

import gc
import weakref
from collections.abc import Callable

import numpy as np
import torch

from precompute.encode.encoders import EncodedCaption
from precompute.encode.overlap import Later
from precompute.encode.samples import About, Cut
from precompute.encode.stages import CaptionsOnce
from precompute.encode.towers import Towers
from precompute.input.captions import CleanCaption
from shards.format.text import TextLatents


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


def test_captions_are_begun_with_the_first_bucket_and_kept_until_the_last() -> None:
    text = Text()
    captions = CaptionsOnce(Towers(None, {"text": text}, {}, batch_size=2))  # type: ignore
    one = captions.start([cut("a", ["a0", None], 2), cut("b", ["b0", "b1"], 1)])
    assert text.calls == [["a0", "b0"], ["b1"]] and list(captions.begun) == ["a"]
    two = captions.start([cut("c", ["c0", None], 1), cut("a", ["a0", None], 2)])
    assert text.calls[2:] == [["c0"]] and captions.begun == {}
    assert two[1] is one[0]
    assert [[caption and caption.text for caption in later().stored] for later in (*one, two[0])] == [
        ["a0", None],
        ["b0", "b1"],
        ["c0", None],
    ]
    gc.collect()  # all were waited for: no batch is held, though the captions are
    assert all(batch() is None for batch in text.batches) and one[0]().finite
