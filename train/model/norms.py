"""GroupNorm and LayerNorm in the autocast type, as in MosaicML's recipe: autocast itself runs them in float32.

The idea and the cast are Composer's (composer/algorithms/low_precision_groupnorm and low_precision_layernorm). Kernels
still sum in float32; what is saved is the traffic of float32 activations, which is what normalisation costs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LowPrecisionGroupNorm(nn.GroupNorm):
    """GroupNorm that takes and gives the autocast type; without autocast it is GroupNorm."""

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, …) → the same shape."""
        kind = input.device.type
        x, weight, bias = in_autocast_type(kind, input, self.weight, self.bias)
        with torch.autocast(kind, enabled=False):
            return F.group_norm(x, self.num_groups, weight, bias, self.eps)


class LowPrecisionLayerNorm(nn.LayerNorm):
    """LayerNorm that takes and gives the autocast type; without autocast it is LayerNorm."""

    def forward(self, input: Tensor) -> Tensor:
        """(…, *normalized_shape) → the same shape."""
        kind = input.device.type
        x, weight, bias = in_autocast_type(kind, input, self.weight, self.bias)
        with torch.autocast(kind, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.GroupNorm: LowPrecisionGroupNorm,
    nn.LayerNorm: LowPrecisionLayerNorm,
}


def use_low_precision_norms(model: nn.Module) -> None:
    """Turn the norms of `model` into their low-precision kind, in place: parameters, names and state dict stay."""
    for module in model.modules():
        if type(module) in REPLACEMENTS:
            module.__class__ = REPLACEMENTS[type(module)]


def in_autocast_type(kind: str, *tensors: Any) -> list[Any]:
    """The tensors in the type that autocast uses on devices of this kind now; as they are where it is off."""
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [tensor if tensor is None else tensor.to(dtype) for tensor in tensors]
