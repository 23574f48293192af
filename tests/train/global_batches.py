"""The samples of global batches, read by a loader."""

import torch

from train.data.loader import Loader
from train.data.spec import DataConfig, DataSpec


def keys_per_step(config: DataConfig, spec: DataSpec, first: int, steps: int) -> list[list[str]]:
    """Return the keys of global batches of 8."""
    batches = iter(Loader(config, spec, 8, 3, first, torch.arange(8)))
    keys = [next(batches).keys for _ in range(steps)]
    batches.close()
    return keys
