"""What small data looks like to the loss."""

import torch

from train.data.spec import DataSpec

CHANNELS, TOKENS, WIDTH = 4, 16, 12


def spec(**changes: object) -> DataSpec:
    """What a loss must know of the data, with the `changes` given instead."""
    fields = {
        "posterior": "moments",
        "latent_channels": CHANNELS,
        "scaling_factor": 0.7,
        "text_length": TOKENS,
        "text_width": WIDTH,
        "trim": False,
        "uncond": torch.randn(TOKENS, WIDTH).half(),
        "uncond_tokens": 2,
        "streams": (),
        "steps_per_epoch": 1,
    }
    return DataSpec(**(fields | changes))  # type: ignore[arg-type]
