"""GroupNorm and LayerNorm in the autocast data type, as in MosaicML's recipe. Autocast itself would use float32.

This avoids the memory traffic of float32 activations, which dominates the cost of normalization. The kernels still
accumulate in float32. The idea and the casts are from Composer (composer/algorithms/low_precision_groupnorm and
low_precision_layernorm).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LowPrecisionGroupNorm(nn.GroupNorm):
    """GroupNorm with inputs and outputs in the autocast data type; without autocast, it is a plain GroupNorm."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (N, C, …)."""
        kind = input.device.type
        x, weight, bias = to_autocast_dtype(kind, input, self.weight, self.bias)
        with torch.autocast(kind, enabled=False):
            return F.group_norm(x, self.num_groups, weight, bias, self.eps)


class LowPrecisionLayerNorm(nn.LayerNorm):
    """LayerNorm with inputs and outputs in the autocast data type; without autocast, it is a plain LayerNorm."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (…, *normalized_shape)."""
        kind = input.device.type
        x, weight, bias = to_autocast_dtype(kind, input, self.weight, self.bias)
        with torch.autocast(kind, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.GroupNorm: LowPrecisionGroupNorm,
    nn.LayerNorm: LowPrecisionLayerNorm,
}


def use_low_precision_norms(model: nn.Module) -> None:
    """Convert the norms in `model` to the low-precision classes, in place. Names and the state dict do not change."""
    for module in model.modules():
        if type(module) in REPLACEMENTS:
            module.__class__ = REPLACEMENTS[type(module)]


def to_autocast_dtype(kind: str, *tensors: Any) -> list[Any]:
    """Cast tensors to the autocast data type of this kind of device. If autocast is disabled, return them unchanged."""
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [tensor if tensor is None else tensor.to(dtype) for tensor in tensors]
