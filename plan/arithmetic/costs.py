"""Sizes of samples and checkpoints in bytes, and constants for unit conversion. 1 TB is 10^12 bytes."""

import math
from collections.abc import Mapping

from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.mds import array_type, shape_header
from shards.format.towers import ImageTower, TextTower
from train.model.config import AdamWConfig

GIGA, TERA = 1e9, 1e12
SECONDS_PER_HOUR = 3600
SECONDS_PER_DAY = 86_400
WEIGHT_BYTES = 4
"""Bytes per parameter that float32 weights take in a checkpoint."""
EMA_BYTES = 4
"""Bytes per parameter that an exponential moving average adds to a checkpoint."""
MDS_SIZE = 4
"""Bytes that an MDS file takes to locate a sample, and to store the size of a column whose size varies."""


def sample_bytes(
    image: ImageTower, texts: Mapping[str, TextTower], bucket: Bucket, real_tokens: float, string_bytes: float
) -> float:
    """Return the bytes of one sample in an MDS file.

    Args:
        real_tokens: number of tokens of a caption that are stored if padding is not.
        string_bytes: combined bytes of the key and the caption.
    """
    record = EncodingRecord(
        image=image, texts=dict(texts), captions=("txt",), max_characters=1, compute_dtype="float16"
    )
    size = MDS_SIZE + string_bytes
    for name, kind in record.columns(bucket).items():
        dtype, shape = array_type(kind)
        if dtype is None:  # the key and the caption
            size += MDS_SIZE
        elif shape is not None:
            size += dtype.itemsize * math.prod(shape)
        else:  # the states of a trimmed caption, which store their shape
            tower = texts[name.partition(".")[2]]
            tokens = min(real_tokens, tower.length)
            trimmed = (tokens, tower.width) if name.startswith("text_latents") else (tokens,)
            size += MDS_SIZE + len(shape_header(tuple(map(math.ceil, trimmed)))) + dtype.itemsize * math.prod(trimmed)
    return size


def checkpoint_bytes(num_parameters: int, ema: bool, state_bytes: int = AdamWConfig.state_bytes) -> int:
    """Return the bytes of one checkpoint: weights, `state_bytes` of optimizer state per parameter, and EMA weights."""
    return num_parameters * (WEIGHT_BYTES + state_bytes + (EMA_BYTES if ema else 0))
