"""Keep activations in the channels-last memory format, which diffusers' modules do not preserve.

Where diffusers makes a tensor contiguous, the next convolution has to copy it back to channels last. These subclasses
avoid the copies before a shortcut, after a transformer, and before an upsampling of 64 images or more, without changing
any values. (diffusers makes tensors contiguous to avoid a DDP warning about strides, and for a kernel in torch versions
before 2.1.)
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

MAX_ELEMENTS = 2**31
"""Maximum number of elements in an upsampled channels-last tensor: torch's kernel counts elements in 32 bits (pytorch
issue 141831)."""


class ChannelsLastTransformer(Transformer2DModel):
    """Transformer2DModel that returns a channels-last view of its tokens (N, h·w, C), without copying them."""

    def _get_output_for_continuous_inputs(
        self, hidden_states: Tensor, residual: Tensor, batch_size: int, height: int, width: int, inner_dim: int
    ) -> Tensor:
        if self.use_linear_projection:
            hidden_states = self.proj_out(hidden_states)
        # (N, h·w, C) => (N, C, h, w)
        hidden_states = hidden_states.reshape(batch_size, height, width, inner_dim).permute(0, 3, 1, 2)
        if not self.use_linear_projection:
            hidden_states = self.proj_out(hidden_states)
        return hidden_states + residual


class ChannelsLastUpsample(Upsample2D):
    """Upsample2D (nearest-neighbor interpolation and a convolution) that keeps the memory format at any batch size."""

    def forward(self, hidden_states: Tensor, output_size: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """Upsample (N, C, h, w) to (N, C, 2h, 2w) or to `output_size`."""
        if 4 * hidden_states.numel() > MAX_ELEMENTS:
            hidden_states = hidden_states.contiguous()
        scale = 2.0 if output_size is None else None
        hidden_states = F.interpolate(hidden_states, size=output_size, scale_factor=scale, mode="nearest")
        convolved: Tensor = self.conv(hidden_states)
        return convolved


def keep_channels_last(network: nn.Module) -> None:
    """Make `network` use channels last for its weights and activations, in place.

    Module names and the state dict do not change.
    """
    network.to(memory_format=torch.channels_last)
    for module in network.modules():
        if type(module) is Transformer2DModel and module.is_input_continuous:
            module.__class__ = ChannelsLastTransformer
        elif type(module) is Upsample2D and _is_plain(module):
            module.__class__ = ChannelsLastUpsample
        elif type(module) is ResnetBlock2D:
            # only this module's forward reads the flag, to decide whether to copy a shortcut's input
            module.training = False


def _is_plain(module: Upsample2D) -> bool:
    """Return whether the module upsamples by interpolation and convolution, without normalization."""
    convolves = module.use_conv and not module.use_conv_transpose and module.name == "conv"
    return convolves and module.interpolate and module.norm is None
