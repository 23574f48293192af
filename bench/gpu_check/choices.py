"""Timings of options that the product does not use, with forward and backward passes of the bare compiled U-Net."""

from collections.abc import Callable
from typing import Any

import torch

from bench.gpu_check.findings import Findings
from bench.gpu_check.setup import Setup, seconds_of
from bench.train_step import TEXT_LENGTH, latent_hw
from shards.base.device import choose_attention
from train.model.network import build_network
from train.model.norms import use_low_precision_norms


def choices(setup: Setup, found: Findings) -> None:
    """Time the trainer's settings, and then one change at a time. The slowest to compile comes last."""
    base = passes(setup, {}, lowered=False)
    found.row("choices", what="the trainer's settings", ms=1e3 * seconds_of(base, setup))
    torch.backends.cudnn.benchmark = True
    found.row("choices", what="cudnn.benchmark", ms=1e3 * seconds_of(base, setup))
    torch.backends.cudnn.benchmark = False
    variants: list[tuple[str, dict[str, Any], bool]] = [
        ("bfloat16 weights (a float32 master would be the optimizer's)", {}, True),
        ("max-autotune-no-cudagraphs", {"mode": "max-autotune-no-cudagraphs"}, False),
    ]
    for what, how, lowered in variants:
        ms = 1e3 * seconds_of(passes(setup, how, lowered), setup) if found.has_time else None
        found.row("choices", what=what if ms else f"{what}: skipped for lack of time", ms=ms)


def passes(setup: Setup, how: dict[str, Any], lowered: bool) -> Callable[[], None]:
    """Make a forward and backward pass of one microbatch at the larger size.

    Args:
        how: options of torch.compile.
    """
    torch.compiler.reset()
    unet = build_network(setup.unet, 0)
    use_low_precision_norms(unet)
    dtype = torch.bfloat16 if lowered else torch.float32
    unet.to(setup.device, dtype=dtype, memory_format=torch.channels_last)
    choose_attention(setup.device)
    unet.compile(**how)
    bucket = setup.buckets[1]
    size = setup.microbatches(bucket)[0]
    latents = torch.randn(size, unet.config.in_channels, *latent_hw(bucket), device=setup.device, dtype=dtype)
    states = torch.randn(size, TEXT_LENGTH, unet.config.cross_attention_dim, device=setup.device, dtype=dtype)
    timesteps = torch.arange(size, device=setup.device)

    def run() -> None:
        with torch.autocast(setup.device.type, torch.bfloat16, enabled=not lowered):
            prediction = unet(latents, timesteps, states).sample
        prediction.float().square().mean().backward()
        unet.zero_grad(set_to_none=True)

    return run
