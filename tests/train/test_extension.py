"""Extension points of training, used from outside the package: optimizers, block hooks and `train_only`."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from plan.arithmetic.costs import checkpoint_bytes
from plan.config import Plan
from shards.base.errors import RequestError
from tests.families.small import FAMILIES
from tests.runs import TRANSFORMER, curve, train_run
from train.model.blocks import find_blocks
from train.model.config import OPTIMIZERS, OptimizerConfig, optimizer_class
from train.model.network import build_network, class_of
from train.model.tensors import load_tensors
from train.run.checkpoints.checkpoint import OPTIMIZER_NAME, WEIGHTS_NAME, newest_checkpoint, step_folder


class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum. It is not fused, so the host decides whether a step is skipped."""

    state_bytes: ClassVar[int] = 4

    kind: Literal["sgd"] = "sgd"
    momentum: float = 0.9

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters.values(), lr=self.lr, momentum=self.momentum)


@pytest.fixture
def sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "sgd", SgdConfig)


@pytest.mark.usefixtures("sgd")
def test_a_custom_optimizer(latents: Path, tmp_path: Path) -> None:
    """It is selected in YAML, saves its state by parameter name, and resumes bit-exactly."""
    optimizer = {"kind": "sgd", "lr": 0.01, "momentum": 0.5}
    whole = train_run(latents, tmp_path / "whole", optimizer=optimizer)
    for max_steps in (3, 6):
        killed = train_run(latents, tmp_path / "killed", optimizer=optimizer, max_steps=max_steps)
        if max_steps == 3:  # simulates a kill before the checkpoint of step 3 was written
            shutil.rmtree(step_folder(killed, 3))
    assert curve(killed) == curve(whole)
    a, b = newest_checkpoint(killed), newest_checkpoint(whole)
    assert a is not None and b is not None and a.content["files"] == b.content["files"]
    weights = load_tensors(a.weights("raw") / WEIGHTS_NAME)
    state = load_tensors(a.folder / OPTIMIZER_NAME)
    assert {name: value.shape for name, value in state.items()} == {
        f"momentum_buffer/{name}": value.shape for name, value in weights.items()
    }
    with pytest.raises(RequestError, match=r"trained with different settings: optimizer: sgd ≠ None \("):
        train_run(latents, tmp_path / "killed", max_steps=7)


@pytest.mark.usefixtures("sgd")
def test_the_planner_knows_custom_optimizers() -> None:
    assert (optimizer_class("adamw").step_bytes(), optimizer_class("sgd").step_bytes()) == (28, 20)
    assert checkpoint_bytes(10, ema=True, state_bytes=SgdConfig.state_bytes) == 120
    assert Plan(optimizer="sgd").optimizer == "sgd"
    with pytest.raises(ValueError, match=r"there is no optimizer of kind sdg \(did you mean sgd\?\); choose one of"):
        Plan(optimizer="sdg")


def route(first: nn.Module, last: nn.Module) -> list[Any]:
    """Make half of the tokens skip the blocks from `first` to `last` (Krause et al., "TREAD", 2025), and return the
    handles of the hooks."""
    whole: list[Tensor] = []

    def shorten(block: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        whole.append(inputs[0])
        return (inputs[0][:, ::2],)

    def restore(block: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        joined = whole.pop().clone()
        joined[:, ::2] = output
        return joined

    return [first.register_forward_pre_hook(shorten), last.register_forward_hook(restore)]


def test_tokens_are_routed_past_blocks() -> None:
    """A hook removes tokens from the input of a block and restores them, unchanged, in the output of a later block."""
    fields = FAMILIES["pixart-sigma"].network | {"num_layers": 4}
    torch.manual_seed(0)
    network = class_of(fields, "the config").from_config(fields)
    blocks, widths = list(find_blocks(network).values()), list[int]()

    def call() -> Tensor:
        arguments = {"encoder_hidden_states": torch.ones(2, 3, 12), "timestep": torch.ones(2)}
        return network(torch.ones(2, 4, 8, 8), **arguments, return_dict=False)[0]

    whole = call()
    handles = route(blocks[1], blocks[2])
    handles += [
        block.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1])) for block in blocks
    ]
    routed = call()
    assert widths == [16, 8, 8, 16] and routed.shape == whole.shape and not routed.allclose(whole)
    routed.sum().backward()
    assert all(parameter.grad is not None for parameter in network.transformer_blocks.parameters())
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(call(), whole, rtol=0, atol=0)


def test_train_only_trains_a_subset_of_the_parameters(latents: Path, tmp_path: Path) -> None:
    """The other parameters keep their values and have no optimizer state. Checkpoints and averages contain all."""
    run = train_run(latents, tmp_path / "run", train_only=["*.attn2.*", "proj_out.bias"], optimizer={"lr": 0.01})
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    network = build_network(TRANSFORMER, seed=0)
    first, last = network.state_dict(), load_tensors(checkpoint.weights("raw") / WEIGHTS_NAME)
    trained = {name for name in first if ".attn2." in name or name == "proj_out.bias"}
    assert trained and first.keys() == last.keys() == load_tensors(checkpoint.weights("ema") / WEIGHTS_NAME).keys()
    assert {name for name in first if not first[name].equal(last[name])} == trained
    state = load_tensors(checkpoint.folder / OPTIMIZER_NAME)
    assert {key.partition("/")[2] for key in state} == trained
    with pytest.raises(RequestError, match=r"trained with different settings: train_only: \['\*\.attn2.* ≠ None"):
        train_run(latents, tmp_path / "run", max_steps=7)
    with pytest.raises(RequestError, match=r"the pattern \*\.atn2\.\*, which matches no parameter of the network"):
        train_run(latents, tmp_path / "other", train_only=["*.atn2.*"])
