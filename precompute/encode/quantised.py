"""Linear layers of a frozen network with one byte per weight: int8, which saves memory, and float8 (e4m3), which also
multiplies in float8."""

import os
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import ScalingType

from shards.base.device import FLOAT8_MULTIPLE, device_module, is_accelerator
from shards.base.errors import UnfitNode
from shards.format.towers import Quantised

Model = TypeVar("Model", bound=nn.Module)
SMALLEST = 1e-12
"""Smallest scale, for rows of zeros."""


def quantise(model: Model, to: Quantised) -> Model:
    """Replace the linear layers of a network with layers with quantised weights, in place. With float8, layers whose
    numbers of inputs and outputs are not both multiples of 16 stay as they are."""
    linears = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    for name, layer in linears.items():
        if to == "int8":
            model.set_submodule(name, Int8Linear(layer))
        elif layer.in_features % FLOAT8_MULTIPLE == layer.out_features % FLOAT8_MULTIPLE == 0:
            model.set_submodule(name, Float8Linear(layer))
    return model


def check_float8(device: torch.device) -> None:
    """Try a product in float8. Raises UnfitNode if the device or the installed torch does not support it."""
    try:
        layer = Float8Linear(nn.Linear(FLOAT8_MULTIPLE, FLOAT8_MULTIPLE)).to(device)
        layer(torch.ones(1, FLOAT8_MULTIPLE, device=device))
    except RuntimeError as error:  # NotImplementedError is one, too
        name = device_module().get_device_name(device) if is_accelerator(device) else "CPU"
        raise UnfitNode(
            f"The {name} of node {os.uname().nodename} cannot multiply in float8 with torch {torch.__version__} "
            f"({str(error).splitlines()[0][:200]}), but the job has a text tower with float8 weights. Use NVIDIA GPUs "
            f"of the Ada, Hopper or Blackwell generation (compute capability 8.9 or higher), or set the tower's "
            f"`weights` to int8, with a new `output`."
        ) from error


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, one scale per output, and products in autocast's precision."""

    weight = None  # transformers' T5 casts a layer's input to the type of its weight, unless this is None
    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear):
        super().__init__()
        weight = layer.weight.detach()
        scales = scales_of(weight, 127.0)
        self.register_buffer("codes", (weight / scales).round_().to(torch.int8))
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (…, in) to outputs (…, out)."""
        return F.linear(inputs, (self.codes * self.scales).to(inputs.dtype), self.bias)


class Float8Linear(nn.Module):
    """A linear layer that multiplies in float8, with one scale per output of the weight and one per row of the input.

    Because each row of the input has its own scale, a caption's results do not depend on the rest of its batch.
    """

    weight = None  # see Int8Linear
    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear):
        super().__init__()
        codes, scales = to_float8(layer.weight.detach())
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales.T.contiguous())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().bfloat16())

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (…, in) to bfloat16 outputs (…, out)."""
        codes, scales = to_float8(inputs.flatten(0, -2).contiguous())
        by_row = ScalingType.RowWise
        rows = F.scaled_mm(
            codes,
            self.codes.T,
            scales,
            by_row,
            self.scales,
            by_row,
            bias=self.bias,
            output_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return rows.unflatten(0, inputs.shape[:-1])


def scales_of(rows: Tensor, largest: float) -> Tensor:
    """Return the scales (N, 1), float32, by which to divide `rows` (N, width) so that each row's largest magnitude
    becomes `largest`."""
    return (rows.abs().amax(dim=1, keepdim=True).float() / largest).clamp_(min=SMALLEST)


def to_float8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return `rows` (N, width) as float8 codes, and their scales (N, 1)."""
    scales = scales_of(rows, torch.finfo(torch.float8_e4m3fn).max)
    return (rows / scales).to(torch.float8_e4m3fn), scales
