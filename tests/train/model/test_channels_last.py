"""Modules keep activations in channels last, and return the same values as diffusers' own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor

from tests.runs import UNET
from train.model.channels_last import ChannelsLastTransformer, ChannelsLastUpsample, keep_channels_last
from train.model.network import build_network

SIDE, CHANNELS = 8, 32


def channels_last(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape).contiguous(memory_format=torch.channels_last).requires_grad_()


MODULES: dict[str, Callable[[], Any]] = {
    "transformer, linear": lambda: Transformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=CHANNELS,
        norm_num_groups=4,
        use_linear_projection=True,
    ),
    "transformer, convolutions": lambda: Transformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=CHANNELS, norm_num_groups=4
    ),
    "upsampling": lambda: Upsample2D(CHANNELS, use_conv=True),
    "shortcut": lambda: ResnetBlock2D(in_channels=CHANNELS, out_channels=2 * CHANNELS, temb_channels=8, groups=4),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
def test_each_module_is_bit_equal_and_stays(make: Callable[[], Any]) -> None:
    """Forward and backward pass, also for a batch so large that diffusers makes it contiguous."""
    torch.manual_seed(1)
    theirs = make()
    theirs.to(memory_format=torch.channels_last)
    ours = make()
    ours.load_state_dict(theirs.state_dict())
    keep_channels_last(ours)
    further = (torch.randn(64, 8),) if isinstance(theirs, ResnetBlock2D) else ()
    answers, gradients = [], []
    for module in (theirs, ours):
        given = channels_last(64, CHANNELS, SIDE, SIDE)
        answer = module(given, *further)
        answer = answer if isinstance(answer, Tensor) else answer.sample
        (answer * torch.linspace(-1, 1, answer.numel()).reshape(answer.shape)).sum().backward()
        answers.append(answer)
        assert given.grad is not None
        gradients.append([given.grad, *(weight.grad for weight in module.parameters() if weight.grad is not None)])
    assert answers[1].equal(answers[0])
    assert answers[1].is_contiguous(memory_format=torch.channels_last)
    for found, expected in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind", [{}, {"use_conv_transpose": True}, {"use_conv": True, "norm_type": "rms_norm"}, {"interpolate": False}]
)
def test_other_kinds_of_upsampling_are_left_alone(kind: dict[str, Any]) -> None:
    keep_channels_last(module := Upsample2D(CHANNELS, **({"use_conv": True} | kind if kind else {})))
    assert type(module) is Upsample2D


def test_upsampling_copies_what_torch_cannot_count() -> None:
    """2³¹ elements fit; with one more row, the result would be wrong in channels last (pytorch issue 141831)."""
    with torch.device("meta"):
        keep_channels_last(module := MODULES["upsampling"]())
    seen: list[bool] = []
    module.conv.register_forward_pre_hook(
        lambda _, given: seen.append(given[0].is_contiguous(memory_format=torch.channels_last))
    )
    for rows in (2**12, 2**12 + 1):
        module(torch.empty(1, CHANNELS, rows, 2**12, device="meta").to(memory_format=torch.channels_last))
    assert seen == [True, False]


def test_a_unet_keeps_its_names_and_its_answer() -> None:
    plain, kept = build_network(UNET, 3), build_network(UNET, 3)
    keep_channels_last(kept)
    kinds = {type(module) for module in kept.modules()}
    assert {ChannelsLastTransformer, ChannelsLastUpsample} <= kinds and not {Transformer2DModel, Upsample2D} & kinds
    assert list(kept.state_dict()) == list(plain.state_dict())
    latents, text = torch.randn(2, 4, 16, 16), torch.randn(2, 5, plain.config.cross_attention_dim)
    given = {"timestep": torch.tensor([3, 700]), "encoder_hidden_states": text, "return_dict": False}
    torch.testing.assert_close(kept(latents, **given)[0], plain(latents, **given)[0], rtol=1e-4, atol=1e-5)


def test_the_configs_unet_is_one_whose_copies_are_known() -> None:
    unet = build_network(Path("configs/unet/sd2-base.json"), None)
    keep_channels_last(unet)
    left = [type(module).__name__ for module in unet.modules() if type(module) in (Transformer2DModel, Upsample2D)]
    assert not left and not any(module.training for module in unet.modules() if isinstance(module, ResnetBlock2D))
