"""Gradient checkpointing: blocks drop their activations in the forward pass and recompute them in the backward pass."""

from typing import Any

from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch.utils.checkpoint import checkpoint

from train.model.blocks import find_blocks


def recompute_blocks(network: Any, every: int = 1) -> None:
    """Recompute the activations of every `every`-th block in the backward pass, starting with the first.

    In a U-Net, these are the residual blocks and the blocks inside of transformers, in the order in which the network
    registers them.
    """
    if every == 1:
        network.enable_gradient_checkpointing()
        return
    inner = [module for module in network.modules() if isinstance(module, ResnetBlock2D | BasicTransformerBlock)]
    for number, block in enumerate(inner or find_blocks(network).values()):
        block.is_recomputed = number % every == 0  # an attribute, because torch.compile guards it

    def call(given: Any, *inputs: Any) -> Any:
        block = getattr(given, "__self__", given)  # PRX passes a method of the block
        return checkpoint(block.__call__, *inputs, use_reentrant=False) if block.is_recomputed else block(*inputs)

    network.enable_gradient_checkpointing(call)
