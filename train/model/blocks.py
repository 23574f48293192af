"""Finding the blocks of a backbone, and running code before and after them.

FSDP gathers weights block by block (train/model/sharding.py), and REPA reads a block's output
(train/objective/alignment.py). Hooks do not change the weights, their names or the network's code, so checkpoints and
exports are unaffected.
"""

import difflib
from collections.abc import Callable, Collection
from typing import Any

from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

Inputs = tuple[Any, ...]
MAX_SUGGESTIONS = 5


class BlockHook:
    """Code that runs before and after a module of the backbone; a subclass overrides one or both methods.

    With gradient checkpointing, the backward pass calls the module and its hook a second time. The hook must then
    return the same result as the first time.
    """

    def before(self, name: str, inputs: Inputs, named: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
        """Return the positional and keyword arguments with which to call the module `name`; by default unchanged."""
        return inputs, named

    def after(self, name: str, output: Any) -> Any:
        """Return the value to use as the output of the module `name`; by default unchanged."""
        return output


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


def add_hook(network: nn.Module, names: Collection[str], hook: BlockHook) -> Callable[[], None]:
    """Run `hook` before and after each of the named modules, and return a function that removes the hook.

    Add hooks before the network is compiled or sharded.

    Raises:
        LookupError: one of the modules does not exist. In this case, the hook is not added to any module.
    """
    handles = []
    for name, module in [(name, find_module(network, name)) for name in names]:

        def before(module: nn.Module, inputs: Inputs, named: dict[str, Any], name: str = name) -> Any:
            return hook.before(name, inputs, named)

        def after(module: nn.Module, inputs: Inputs, output: Any, name: str = name) -> Any:
            return hook.after(name, output)

        # a method that is not overridden is not registered, so it costs nothing
        if type(hook).before is not BlockHook.before:
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if type(hook).after is not BlockHook.after:
            handles.append(module.register_forward_hook(after))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove
