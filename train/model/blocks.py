"""Finding the blocks and other modules of a backbone.

FSDP gathers weights block by block (train/model/sharding.py), and REPA reads a block's output with a forward hook
(train/objective/alignment.py). torch's hooks do not change the weights, their names or the network's code, so
checkpoints and exports are unaffected. Add them before the network is compiled or sharded. With gradient checkpointing,
the backward pass calls the module and its hooks a second time, and they must then return the same as the first time.
"""

import difflib

from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

MAX_SUGGESTIONS = 5


def find_blocks(network: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a backbone by module name, in the order in which the network registers them.

    In a U-Net, these are the residual blocks and the transformers; in a transformer, the entries of its block lists.
    """
    unet_blocks = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, ResnetBlock2D | Transformer2DModel)
    }
    if unet_blocks:
        return unet_blocks
    return {
        f"{list_name}.{number}": block
        for list_name, blocks in network.named_children()
        if isinstance(blocks, nn.ModuleList)
        for number, block in enumerate(blocks)
    }


def find_module(network: nn.Module, name: str) -> nn.Module:
    """Return the module named `name`, which may be a block, a part of a block, or a container of several blocks.

    Raises:
        LookupError: there is no such module; the message lists the nearest names in the top two levels.
    """
    modules = dict(network.named_modules())
    if not name or name not in modules:
        top = [each for each in modules if each and each.count(".") <= 1]
        near = difflib.get_close_matches(name, top, n=MAX_SUGGESTIONS, cutoff=0.3) or top
        raise LookupError(f"{name} is not a module of the network. The nearest names are {', '.join(near)}")
    return modules[name]
