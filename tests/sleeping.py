"""Towers whose device sleeps instead of computing and records how long it worked, and tars encoded on it."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from precompute.config import PrecomputeConfig, describe_encoding, make_recipe
from precompute.encode.overlap import Turns
from precompute.encode.tar import encode_tar
from precompute.encode.towers import PictureLatents, Timer, Towers, WaitForCaptions
from precompute.input.find import find_input
from shards.format.buckets import Bucket
from shards.format.text import TextLatents
from shards.open import open_store
from shards.root.committed import TarReceipts
from shards.root.shared import create_root, record_rules
from tests.fixtures import make_towers


@dataclass
class Device:
    """Works on one batch at a time, in the order of the requests, like a GPU's stream."""

    seconds: float
    """Duration of a batch."""
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    work: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each batch."""
    asked: int = 0
    rests: int = 0
    """Batches at whose end no other one was waiting, including the last one."""

    def start(self) -> Future[None]:
        self.asked += 1
        return self.thread.submit(self._sleep)

    def _sleep(self) -> None:
        began = time.monotonic()
        time.sleep(self.seconds)
        self.work.append((began, time.monotonic()))
        self.rests += self.asked == len(self.work)

    @property
    def busy(self) -> float:
        """Share of the time between the start of the first batch and the end of the last."""
        return sum(end - began for began, end in self.work) / (self.work[-1][1] - self.work[0][0])


class SleepingTowers(Towers):
    """Towers that return noise for every image, and the latents of the empty caption for every caption."""

    def __init__(self, towers: Towers, device: Device):
        super().__init__(towers.texts, towers.batch_size, image=towers.image, features=towers.features)
        self.sleeper = device
        self.empty = towers.empty_caption()

    def empty_caption(self) -> dict[str, TextLatents]:
        return self.empty

    def start_groups(self, groups: list[list[str]], timer: Timer = nullcontext) -> Iterator[WaitForCaptions]:
        for texts in groups:
            yield partial(iter, [(self.empty, False)] * len(texts))

    def start_pictures(
        self, bucket: Bucket, pictures: list[np.ndarray], timer: Timer = nullcontext
    ) -> Callable[[], Iterator[PictureLatents]]:
        asleep = self.sleeper.start()
        # big parts of small pictures: what goes up is noise, which nothing compresses
        latents = torch.randn(len(pictures), 8, bucket.height // 8, bucket.width // 8).half()

        def waited() -> Iterator[PictureLatents]:
            asleep.result()
            return (PictureLatents(rows, {}) for rows in latents)

        return waited


def encode_asleep(config: PrecomputeConfig, device: Device, at_once: int) -> Sequence[TarReceipts]:
    """Encode all tars of a config, `at_once` at a time, in the threads of one worker."""
    store = open_store(config.output)
    encoding = describe_encoding(config)
    create_root(store, encoding)
    record_rules(store, config.to_fill.rules)
    recipe, towers, turns = make_recipe(config, encoding), SleepingTowers(make_towers(config), device), Turns()
    with ThreadPoolExecutor(at_once) as hands:
        calls = [
            hands.submit(encode_tar, tar, recipe, store, towers, turns=turns)
            for tar in find_input(config.input).units()
        ]
        return [call.result() for call in calls]
