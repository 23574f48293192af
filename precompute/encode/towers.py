"""All of a job's encoders as one: what a batch of pictures and its captions go through."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from precompute.encode.encoders import EncodedCaption, ImageEncoder, TextEncoder
from precompute.encode.samples import Later
from shards.format.buckets import Bucket

PIXELS_PER_BATCH_ITEM = 512 * 512


def batch_size_of(bucket: Bucket, batch_size: int) -> int:
    """`batch_size` holds up to 512x512; a larger bucket's batch has as many pixels."""
    return max(1, batch_size * PIXELS_PER_BATCH_ITEM // max(PIXELS_PER_BATCH_ITEM, bucket.width * bucket.height))


class Towers:
    """One image encoder and one text encoder. Every batch is filled up to one size."""

    def __init__(self, image: ImageEncoder, text: TextEncoder, batch_size: int):
        self.image, self.text = image, text
        self.batch_size = batch_size

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.image.device

    def empty_caption(self) -> EncodedCaption:
        """The text latents of no caption."""
        return self.text([""], self.batch_size)[0]

    def start_pictures(self, bucket: Bucket, pictures: list[np.ndarray]) -> Callable[[], Tensor]:
        """Begin with pictures of `bucket`, (height, width, 3) uint8 each; the function returned waits for their
        latents."""
        return self.image.start(pictures, batch_size_of(bucket, self.batch_size))

    def start_captions(self, texts: list[str]) -> Iterator[Callable[[], EncodedCaption]]:
        """Begin with any number of captions; each function returned waits for one's latents."""
        for first in range(0, len(texts), self.batch_size):
            batch = texts[first : first + self.batch_size]
            encoded = Later(self.text.start(batch, self.batch_size))
            yield from (partial(_row, encoded, row) for row in range(len(batch)))


def _row(encoded: Callable[[], list[EncodedCaption]], row: int) -> EncodedCaption:
    return encoded()[row]
