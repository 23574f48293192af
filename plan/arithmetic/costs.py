"""Sizes of samples and checkpoints in bytes, and constants for unit conversion. 1 TB is 10^12 bytes."""

from shards.format.towers import ImageStorage, TextTower
from train.model.config import AdamWConfig

GIGA, TERA = 1e9, 1e12
SECONDS_PER_HOUR = 3600
SECONDS_PER_DAY = 86_400
WEIGHT_BYTES = 4
"""Bytes per parameter that float32 weights take in a checkpoint."""
EMA_BYTES = 4
"""Bytes per parameter that an exponential moving average adds to a checkpoint."""

_MDS_OFFSET = 4
_MDS_SIZE = 4  # size prefix of every variable-length column
_SIZE_AND_SCORES = 32
_NUM_TOKENS = 4
_SCALE = 4


def text_bytes(tower: TextTower, real_tokens: float) -> float:
    """Return the bytes that one caption takes in a text encoder's columns. If `tower.trim`, padding is not stored."""
    tokens = min(real_tokens, tower.length) if tower.trim else tower.length
    size = 2.0 * tower.pooled
    if tower.states:
        size += tokens * tower.width * 2 if tower.storage == "float16" else tokens * (tower.width + 2)
        size += _NUM_TOKENS if tower.hides_padding else 0
    if tower.trim:  # variable-length arrays store their shape: the number of dimensions, then each size
        size += _MDS_SIZE + 5
        size += _MDS_SIZE + 2 if tower.storage == "float8" else 0
    return size


def sample_bytes(
    num_planes: int,
    latent_hw: tuple[int, int],
    text: float,
    string_bytes: float,
    image_storage: ImageStorage = "float16",
    channels: int = 0,
) -> float:
    """Return the bytes of one sample in an MDS file: the columns in shards/format/encoding.py, and the MDS framing.

    Args:
        num_planes: number of stored channels; for moments, twice the number of latent channels.
        text: bytes in the columns of all text encoders.
        string_bytes: combined bytes of the key and the caption.
        channels: number of latent channels. In int8, one scale is stored per channel.
    """
    height, width = latent_hw
    image = 2 * num_planes * height * width
    if image_storage == "int8":
        image = num_planes * height * width + _SCALE * channels
    framing = _MDS_OFFSET + 2 * _MDS_SIZE  # two size prefixes: key and caption
    return image + text + string_bytes + _SIZE_AND_SCORES + framing


def checkpoint_bytes(num_parameters: int, ema: bool, state_bytes: int = AdamWConfig.state_bytes) -> int:
    """Return the bytes of one checkpoint: weights, `state_bytes` of optimizer state per parameter, and EMA weights."""
    return num_parameters * (WEIGHT_BYTES + state_bytes + (EMA_BYTES if ema else 0))
