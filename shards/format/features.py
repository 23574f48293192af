"""How a picture's features are stored: the columns `features.NAME`, and `feature_scales.NAME` beside e4m3 codes."""

import numpy as np
from torch import Tensor

from shards.format.buckets import Bucket
from shards.format.text import stored
from shards.format.towers import FeatureTower


def pack(name: str, tower: FeatureTower, features: Tensor) -> dict[str, np.ndarray]:
    """(tokens, width) features of one picture, floats on the CPU → the columns of its sample."""
    return dict(zip((f"features.{name}", f"feature_scales.{name}"), stored(features, tower.storage), strict=False))


def columns(name: str, tower: FeatureTower, bucket: Bucket) -> dict[str, str]:
    """The MDS column types of `pack`'s result.

    Raises:
        ValueError: the bucket does not fit the tower.
    """
    height, width = tower.grid(bucket)
    tokens = height * width
    if tower.storage == "float16":
        return {f"features.{name}": f"ndarray:float16:{tokens},{tower.width}"}
    return {
        f"features.{name}": f"ndarray:uint8:{tokens},{tower.width}",
        f"feature_scales.{name}": f"ndarray:float16:{tokens}",
    }
