"""Activations stay in the memory format of channels last: diffusers copies them out of it, and convolutions back.

Every value is what it was; a copy less is made before a shortcut, after a transformer, and before an upsampling of 64
pictures or more. (diffusers' reasons: a warning of DDP about strides, and a kernel of torch before 2.1.)
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

MOST_NUMBERS = 2**31
"""Of an upsampled tensor: torch's kernel for channels last counts them in 32 bits (pytorch issue 141831)."""


class ChannelsLastTransformer(Transformer2DModel):
    """A transformer whose result stays as its tokens lie: (N, h, w, C)."""

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
    """An upsampling by nearest neighbours and a convolution, in one memory format whatever the batch."""

    def forward(self, hidden_states: Tensor, output_size: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """(N, C, h, w) → (N, C, 2h, 2w), or of `output_size`."""
        if 4 * hidden_states.numel() > MOST_NUMBERS:
            hidden_states = hidden_states.contiguous()
        scale = 2.0 if output_size is None else None
        hidden_states = F.interpolate(hidden_states, size=output_size, scale_factor=scale, mode="nearest")
        convolved: Tensor = self.conv(hidden_states)
        return convolved


def keep_channels_last(network: nn.Module) -> None:
    """Turn weights and activations of `network` to channels last, in place: parameters, names and state dict stay."""
    network.to(memory_format=torch.channels_last)
    for module in network.modules():
        if type(module) is Transformer2DModel and module.is_input_continuous:
            module.__class__ = ChannelsLastTransformer
        elif type(module) is Upsample2D and _is_plain(module):
            module.__class__ = ChannelsLastUpsample
        elif type(module) is ResnetBlock2D:
            # read in its own forward alone, where it says whether a shortcut's input is copied; its parts have theirs
            module.training = False


def _is_plain(module: Upsample2D) -> bool:
    convolves = module.use_conv and not module.use_conv_transpose and module.name == "conv"
    return convolves and module.interpolate and module.norm is None
