"""Which blocks compute their activations twice, and that gradients do not depend on it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from pydantic import ValidationError
from torch import Tensor, nn

from tests.graphs import Graphs
from tests.runs import UNET, train_fields
from train.config import TrainConfig
from train.model.network import build_network, compile_network
from train.model.recompute import recompute_blocks

Case = tuple[Any, Callable[[Any], Tensor], list[nn.Module]]


def unet() -> Case:
    """Return a U-Net, a function that computes its loss, and its blocks in the order in which it registers them."""
    torch.manual_seed(0)
    network = build_network(UNET, 0).train()
    inputs = torch.randn(2, 4, 16, 16), torch.tensor([3, 700]), torch.randn(2, 5, network.config.cross_attention_dim)
    blocks = [part for part in network.modules() if isinstance(part, ResnetBlock2D | BasicTransformerBlock)]
    return network, lambda model: model(*inputs).sample.square().mean(), blocks


def flux() -> Case:
    """Return the same for a transformer with two lists of blocks."""
    torch.manual_seed(0)
    network = FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 6, 6),
    ).train()
    inputs: dict[str, Tensor] = {
        "hidden_states": torch.randn(2, 6, 4),
        "encoder_hidden_states": torch.randn(2, 3, 8),
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.tensor([0.1, 0.7]),
        "img_ids": torch.zeros(6, 3),
        "txt_ids": torch.zeros(3, 3),
    }
    blocks = [*network.transformer_blocks, *network.single_transformer_blocks]
    return network, lambda model: model(**inputs).sample.square().mean(), blocks


def gradients(network: Any, loss: Callable[[Any], Tensor]) -> list[Tensor]:
    """Return the gradients of the loss."""
    network.zero_grad()
    loss(network).backward()
    return [weight.grad for weight in network.parameters() if weight.grad is not None]


@pytest.mark.parametrize("make", [unet, flux])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_kth_block_is_computed_twice(make: Callable[[], Case], every: int) -> None:
    network, loss, blocks = make()
    expected = [grad.clone() for grad in gradients(network, loss)]
    called: list[nn.Module] = []
    for block in blocks:
        block.register_forward_pre_hook(lambda block, _: called.append(block))
    recompute_blocks(network, every)
    for found, wanted in zip(gradients(network, loss), expected, strict=True):
        assert torch.equal(found, wanted)
    twice = {number for number, block in enumerate(blocks) if called.count(block) == 2}
    once = {number for number, block in enumerate(blocks) if called.count(block) == 1}
    # a U-Net's middle begins with a block that diffusers never recomputes
    middle = {blocks.index(network.mid_block.resnets[0])} if make is unet else set()
    assert twice == {*range(0, len(blocks), every)} - middle
    assert twice | once == {*range(len(blocks))}


@pytest.mark.heavy
@pytest.mark.parametrize("by_block", [False, True])
def test_it_compiles_without_breaks(by_block: bool, graphs: Graphs) -> None:
    network, loss, _ = unet()
    expected = [grad.clone() for grad in gradients(copy.deepcopy(network), loss)]
    recompute_blocks(network, 2)
    compile_network(network, 1, by_block=by_block)
    for found, wanted in zip(gradients(network, loss), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert graphs.captured and not graphs.breaks


@pytest.mark.parametrize("value", [0.5, -1, "some"])
def test_other_values_are_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="gradient_checkpointing"):
        TrainConfig.model_validate(train_fields(tmp_path, tmp_path, gradient_checkpointing=value))
