"""Gradient checkpointing: activations are dropped in the forward pass and recomputed in the backward pass."""

import math
from typing import Any

from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch.utils.checkpoint import checkpoint

from train.model.blocks import find_blocks
from train.model.config import Checkpointing


def recomputed_shares(setting: Checkpointing, compiled: bool) -> tuple[float, float]:
    """Return the share of blocks to pass to `recompute_blocks`, and the share of activations to pass to
    `compile_network`. At least one of them is 0."""
    share = float(setting)
    return (0.0, share) if compiled and share < 1 else (share, 0.0)


def recompute_blocks(network: Any, share: float = 1.0) -> None:
    """Recompute the activations of a share of the blocks, evenly spaced, starting with the first.

    In a U-Net, these are the residual blocks and the blocks inside of transformers, in the order in which the network
    registers them.
    """
    if share == 1:
        network.enable_gradient_checkpointing()
        return
    inner = [module for module in network.modules() if isinstance(module, ResnetBlock2D | BasicTransformerBlock)]
    for number, block in enumerate(inner or find_blocks(network).values()):
        # an attribute, because a copy of the network has other blocks
        block.is_recomputed = math.ceil(round((number + 1) * share, 9)) > math.ceil(round(number * share, 9))

    def call(given: Any, *inputs: Any) -> Any:
        block = getattr(given, "__self__", given)  # PRX passes a method of the block
        return checkpoint(block.__call__, *inputs, use_reentrant=False) if block.is_recomputed else block(*inputs)

    network.enable_gradient_checkpointing(call)
