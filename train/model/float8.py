"""Linear layers that multiply in float8, with torchao (https://github.com/pytorch/ao/tree/main/torchao/float8)."""

import math
import os
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from shards.base.device import FLOAT8_MULTIPLE, Precision, device_module, is_accelerator, multiplies_float8

PER_GRADIENT, PER_INPUT, PER_WEIGHT = 6, 10, 18
"""Memory traffic of scaling and casting to float8, in bytes per element of the output's gradient, the input and the
weight. Each is read once for its maximum and once for the cast. bfloat16 inputs and float32 weights are cast in the
forward pass and again in the backward pass; bfloat16 gradients are written in two layouts."""
BYTES_SAVED = 0.01
"""Bytes that an H100 moves in the time that float8 saves per element of the weight and row of the input, for the 6
operations of a layer's three matrix products: 6 · (1 / 989 - 1 / 1979) / 10¹² s at 3.35 TB/s."""
OLDEST_TORCHAO = (0, 18)
"""Earlier versions do not work around a fault in Triton's maximum, which returned NaN scales (triton #11111)."""


def large_linears(network: nn.Module, call: Callable[[], object], num_samples: int) -> list[str]:
    """Return the names of the linear layers that are large enough for float8 to save time.

    A layer with r rows, i inputs and o outputs is large enough if casting takes less time than the faster products
    save: 6 r o + 10 r i + 18 i o bytes < 0.01 r i o bytes. This is a model; no layer was timed.

    Args:
        network: a network on any device. Its weights are not read if `call` uses the meta device.
        call: function that calls the network on one sample.
        num_samples: number of samples per microbatch.
    """
    rows: Counter[str] = Counter()

    def count(name: str, module: nn.Linear, inputs: Any, output: torch.Tensor) -> None:
        rows[name] += num_samples * math.prod(output.shape[:-1])

    linears = {name: module for name, module in network.named_modules() if type(module) is nn.Linear}
    hooks = [module.register_forward_hook(partial(count, name)) for name, module in linears.items()]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name in rows if _is_large(linears[name], rows[name])]


def _is_large(layer: nn.Linear, rows: int) -> bool:
    inputs, outputs = layer.in_features, layer.out_features
    traffic = PER_GRADIENT / inputs + PER_INPUT / outputs + PER_WEIGHT / rows
    return inputs % FLOAT8_MULTIPLE == outputs % FLOAT8_MULTIPLE == 0 and traffic < BYTES_SAVED


def float8_problem(device: torch.device, precision: Precision) -> str | None:
    """Return an error message if this process cannot train with float8, or None."""
    if not is_accelerator(device) or not multiplies_float8(device):
        where = device_module().get_device_name(device) if is_accelerator(device) else "The CPU"
        return (
            f"float8: {where} has no fast float8 matrix products. They need an NVIDIA GPU of the Ada, Hopper or "
            f"Blackwell generation (compute capability 8.9 or higher). Set float8 to false."
        )
    if precision != "bfloat16":
        return f"float8 does not support precision {precision}. Set precision to bfloat16, or float8 to false."
    try:
        found = version("torchao")
    except PackageNotFoundError:
        found = "none"
    if found == "none" or tuple(map(int, found.split(".")[:2])) < OLDEST_TORCHAO:
        oldest = ".".join(map(str, OLDEST_TORCHAO))
        return (
            f"float8 needs torchao {oldest} or later; {os.uname().nodename} has {found}. Install it on every node (pip "
            f"install 'torchao>={oldest}'), or set float8 to false."
        )
    return None


def use_float8(network: nn.Module, layers: Collection[str], *, emulated: bool = False) -> None:
    """Replace linear layers, in place, with layers that multiply in float8, in the forward and the backward pass.

    Inputs, weights and gradients are each scaled by their largest magnitude, with one scale per tensor. Parameters keep
    their names, data types and values. Hooks on these layers are lost.

    Args:
        layers: names of the layers.
        emulated: multiply the rounded values in float32, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(pad_inner_dim=True, emulate=emulated)  # pads rows to a multiple of 16
    convert_to_float8_training(network, module_filter_fn=lambda _, name: name in layers, config=config)
