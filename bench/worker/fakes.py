"""Fake encoders that take no time or behave like a GPU, and encoding records without weights."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from bench.kit.roots import encoding_record
from precompute.encode.encoders import TowerCaption
from shards.format.encoding import EncodingRecord
from shards.format.text import TextLatents
from shards.format.towers import ImageTower, TextTower

TEXT_LENGTH, TEXT_WIDTH = 77, 1024


class Zeros:
    """Batches of float16 zeros that are allocated once, like the pinned memory for a device's results."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, number: int, *shape: int) -> torch.Tensor:
        """Return zeros of shape (number, *shape)."""
        if number > len(self.made.get(shape, ())):
            self.made[shape] = torch.zeros(number, *shape, dtype=torch.float16).clone()
        return self.made[shape][:number]


class FreeImageEncoder:
    """Replacement for `ImageEncoder` that returns zeros immediately."""

    def __init__(self, tower: ImageTower):
        self.tower = tower
        self.zeros = Zeros()
        self.device = torch.device("cpu")

    def stack(self, pictures: list[np.ndarray], batch_size: int) -> torch.Tensor:
        """Return an uninitialised batch instead of copying the images."""
        return torch.empty((batch_size, *pictures[0].shape), dtype=torch.uint8)

    def start_batch(self, pixels: torch.Tensor, count: int) -> Callable[[], torch.Tensor]:
        """Return a function that returns zeros (count, planes, h, w)."""
        height, width = (side // self.tower.downsampling for side in pixels.shape[1:3])
        return lambda: self.zeros(count, self.tower.num_planes, height, width)


class FreeTextEncoder:
    """Replacement for `TextEncoder` that returns zeros immediately."""

    def __init__(self, tower: TextTower):
        self.tower = tower
        self.zeros = Zeros()

    def start_batch(self, captions: list[str], batch_size: int) -> Callable[[], list[TowerCaption]]:
        """Return a function that returns zeros (tokens, width) for each caption."""
        length = self.tower.length
        states = self.zeros(len(captions), length, self.tower.width)
        return lambda: [TowerCaption(TextLatents(row, length), False) for row in states]


class SleepingImageEncoder(FreeImageEncoder):
    """Replacement that behaves like a GPU: it runs one batch at a time, for `seconds_per_picture` per image."""

    def __init__(self, tower: ImageTower, seconds_per_picture: float):
        super().__init__(tower)
        self.seconds_per_picture = seconds_per_picture
        self.one_at_a_time = ThreadPoolExecutor(1)

    def start_batch(self, pixels: torch.Tensor, count: int) -> Callable[[], torch.Tensor]:
        """Queue a batch, and return a function that waits for its result."""
        zeros = super().start_batch(pixels, count)
        done = self.one_at_a_time.submit(time.sleep, count * self.seconds_per_picture)

        def wait() -> torch.Tensor:
            done.result()
            return zeros()

        return wait


def sd2_record() -> EncodingRecord:
    """Make an encoding record with Stable Diffusion 2's shapes and the default storage, without weights."""
    return stored_as(encoding_record(TEXT_LENGTH, TEXT_WIDTH), exact=False)


def stored_as(record: EncodingRecord, exact: bool) -> EncodingRecord:
    """Return a copy of the record that stores float16 if `exact`, else int8 and float8 (the default)."""
    image = record.image.model_copy(update={"storage": "float16" if exact else "int8"})
    storage = {"storage": "float16" if exact else "float8"}
    texts = {name: tower.model_copy(update=storage) for name, tower in record.texts.items()}
    return record.model_copy(update={"image": image, "texts": texts})


def free_encoders(record: EncodingRecord) -> tuple[FreeImageEncoder, dict[str, FreeTextEncoder]]:
    """Make free encoders for a record's image tower and text towers."""
    return FreeImageEncoder(record.image), {name: FreeTextEncoder(tower) for name, tower in record.texts.items()}
