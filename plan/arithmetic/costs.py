"""Days, dollars and bytes. Pure arithmetic; 1 TB is 10^12 bytes."""

import math

from shards.format.towers import ImageStorage, TextTower

GIGA, TERA = 1e9, 1e12
SECONDS_PER_HOUR = 3600
SECONDS_PER_DAY = 86_400
CHECKPOINT_BYTES = 12
"""Per parameter, in float32: the weight and AdamW's two moments."""
EMA_BYTES = 4

_MDS_OFFSET = 4
_MDS_SIZE = 4  # of each column of varying size
_SIZE_AND_SCORES = 32
_NUM_TOKENS = 4
_SCALE = 4


def days_of(num_images: float, images_per_second: float) -> float:
    return num_images / images_per_second / SECONDS_PER_DAY


def gpu_hours_of(days: float, gpus: int) -> float:
    return days * 24 * gpus


def text_bytes(tower: TextTower, real_tokens: float) -> float:
    """Bytes of one caption's columns of a text tower.

    Args:
        real_tokens: the mean of a caption's, of which a trimmed one has no others.
    """
    tokens = min(real_tokens, tower.length) if tower.trim else tower.length
    size = 2.0 * tower.pooled
    if tower.states:
        size += tokens * tower.width * 2 if tower.storage == "float16" else tokens * (tower.width + 2)
        size += _NUM_TOKENS if tower.hides_padding else 0
    if tower.trim:  # the shape travels with each array: its number of dimensions, then each as the smallest integer
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
    """Bytes of one sample in an MDS shard: shards/format/encoding.py's columns with MDS's own offsets and sizes.

    Args:
        num_planes: stored channels: 2 × latent channels for moments.
        text: bytes of all text towers' columns.
        string_bytes: key and caption together.
        channels: of the latents, each of which has a scale beside int8.
    """
    height, width = latent_hw
    image = 2 * num_planes * height * width
    if image_storage == "int8":
        image = num_planes * height * width + _SCALE * channels
    framing = _MDS_OFFSET + 2 * _MDS_SIZE  # key, caption
    return image + text + string_bytes + _SIZE_AND_SCORES + framing


def checkpoint_bytes(num_parameters: int, ema: bool) -> int:
    """Bytes of one checkpoint: weights and AdamW's moments, and the averaged weights."""
    return num_parameters * (CHECKPOINT_BYTES + (EMA_BYTES if ema else 0))


def egress_bytes(read: float, shares: dict[str, float], region: str) -> float:
    """Of `read` bytes, those that come from outside `region`."""
    return read * sum(share for name, share in shares.items() if name != region)


def break_even_passes(encode_once: float, store: float, encode_per_pass: float) -> float:
    """Passes over the samples from which encoding beforehand is no dearer than encoding at each pass; all in $.

    Args:
        encode_once: encoding every sample beforehand, with what is encoded in vain.
        store: keeping the latents while training.
        encode_per_pass: encoding every sample once, during training.
    """
    return (encode_once + store) / encode_per_pass


def speedup_per_doubling(before: float, after: float, gpus_before: int, gpus_after: int) -> float:
    """How many times faster training gets for each doubling of the GPUs: 2 is perfect. Times in any one unit."""
    return math.pow(before / after, 1 / math.log2(gpus_after / gpus_before))
