"""Gradient checkpointing recomputes the right blocks and does not change the gradients."""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from shards.base.config import load_config
from shards.base.errors import RequestError
from tests.runs import UNET, train_fields, write_config
from train.config import TrainConfig
from train.model.config import Checkpointing
from train.model.memory import PARTITIONED, Recorder, compiler_settings
from train.model.network import compile_network
from train.model.recompute import recompute_blocks

Case = tuple[Any, Callable[[Any], Tensor], list[nn.Module]]


def unet(**changes: Any) -> Case:
    """Return a U-Net, a function that computes its loss, and its blocks in the order in which it registers them."""
    torch.manual_seed(0)
    network = UNet2DConditionModel.from_config(json.loads(UNET.read_text()) | changes).train()
    inputs = torch.randn(2, 4, 16, 16), torch.tensor([3, 700]), torch.randn(2, 5, network.config.cross_attention_dim)
    blocks = [part for part in network.modules() if isinstance(part, ResnetBlock2D | BasicTransformerBlock)]
    return network, lambda model: model(*inputs).sample.square().mean(), blocks


def small_unet() -> Case:
    """Return the same for a U-Net without attention and middle, because compiling takes a second per block."""
    blocks = {"down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"], "mid_block_type": None}
    return unet(**blocks, block_out_channels=[16])


def flux(num_layers: int = 2, num_single_layers: int = 3) -> Case:
    """Return the same for a transformer with two lists of blocks."""
    torch.manual_seed(0)
    network = FluxTransformer2DModel(
        in_channels=4,
        num_layers=num_layers,
        num_single_layers=num_single_layers,
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
@pytest.mark.parametrize(("share", "pattern"), [(1.0, "1"), (0.75, "1110"), (0.5, "10"), (0.3, "1001001000")])
def test_a_share_of_the_blocks_is_computed_twice(make: Callable[[], Case], share: float, pattern: str) -> None:
    network, loss, blocks = make()
    expected = [grad.clone() for grad in gradients(network, loss)]
    called: list[nn.Module] = []
    for block in blocks:
        block.register_forward_pre_hook(lambda block, _: called.append(block))
    recompute_blocks(network, share)
    for found, wanted in zip(gradients(network, loss), expected, strict=True):
        assert torch.equal(found, wanted)
    twice = {number for number, block in enumerate(blocks) if called.count(block) == 2}
    once = {number for number, block in enumerate(blocks) if called.count(block) == 1}
    # a U-Net's middle begins with a block that diffusers never recomputes
    middle = {blocks.index(network.mid_block.resnets[0])} if make is unet else set()
    assert twice == {n for n in range(len(blocks)) if pattern[n % len(pattern)] == "1"} - middle
    assert twice | once == {*range(len(blocks))}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("make", "by_block"), [(small_unet, False), pytest.param(partial(flux, 1, 1), True, marks=pytest.mark.slow)]
)
def test_torch_recomputes_what_takes_the_least_work(make: Callable[[], Case], by_block: bool) -> None:
    """Recomputing half of the activations leaves less in memory between the two passes, takes fewer operations than
    recomputing all blocks, and does not change a bit of the gradients."""
    network, loss, _ = make()
    saved, flops, grads = [], [], []
    for share in (0.0, 0.5, True):
        again = copy.deepcopy(network)
        with compiler_settings():
            if share is True:
                recompute_blocks(again)
            else:
                compile_network(again, 1, by_block=by_block, recomputed=share, backend=PARTITIONED)
            gradients(again, loss)  # compiles
            again.zero_grad()
            with Recorder() as recorder:
                value = loss(again)
                saved.append(recorder.now)
                value.backward()
        flops.append(recorder.flops)
        grads.append(torch.cat([weight.grad.flatten() for weight in again.parameters()]))
    assert grads[0].equal(grads[1])
    torch.testing.assert_close(grads[2], grads[0], rtol=1e-4, atol=1e-6)  # not compiled
    assert saved[0] > saved[1] > saved[2] and flops[0] <= flops[1] < flops[2]


@pytest.mark.parametrize(
    ("words", "expected"), [(["false"], False), (["true"], True), (["1"], True), (["0.5"], 0.5), (["0"], False)]
)
def test_values(words: list[str], expected: Checkpointing, tmp_path: Path) -> None:
    config = write_config(tmp_path, train_fields(tmp_path, tmp_path / "run"))
    found = load_config(TrainConfig, config, ["--gradient_checkpointing", *words], "train").gradient_checkpointing
    assert found == expected and isinstance(found, bool) == isinstance(expected, bool)


@pytest.mark.parametrize("value", ["2", "1.5", "-0.5", "some"])
def test_other_values_are_refused(value: str, tmp_path: Path) -> None:
    config = write_config(tmp_path, train_fields(tmp_path, tmp_path / "run"))
    with pytest.raises(RequestError, match="gradient_checkpointing"):
        load_config(TrainConfig, config, ["--gradient_checkpointing", value], "train")
