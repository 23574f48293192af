"""Extension points of training, each used here from outside the package: optimizers."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn

from plan.arithmetic.costs import checkpoint_bytes
from plan.config import Plan
from shards.base.errors import RequestError
from tests.runs import curve, train_fields, write_config
from train.__main__ import run as command
from train.model.config import OPTIMIZERS, OptimizerConfig, optimizer_class
from train.model.tensors import load_tensors
from train.run.saving.checkpoint import OPTIMIZER_NAME, newest_checkpoint, step_folder


def train(folder: Path, latents: Path, name: str, **changes: Any) -> Path:
    """Train in this process and return the run folder."""
    command(["--config", str(write_config(folder, train_fields(latents, folder / name, **changes)))])
    return folder / name


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
def test_another_optimizer(latents: Path, tmp_path: Path) -> None:
    """It trains from YAML, saves its state by parameter name, and resumes bit-exactly."""
    optimizer = {"kind": "sgd", "lr": 0.01, "momentum": 0.5}
    whole = train(tmp_path, latents, "whole", optimizer=optimizer)
    for max_steps in (3, 6):
        killed = train(tmp_path, latents, "killed", optimizer=optimizer, max_steps=max_steps)
        if max_steps == 3:  # as after a kill that came before the checkpoint was written
            shutil.rmtree(step_folder(killed, 3))
    assert curve(killed) == curve(whole)
    a, b = newest_checkpoint(killed), newest_checkpoint(whole)
    assert a is not None and b is not None and a.content["files"] == b.content["files"]
    weights = load_tensors(a.weights("raw") / "diffusion_pytorch_model.safetensors")
    state = load_tensors(a.folder / OPTIMIZER_NAME)
    assert {name: value.shape for name, value in state.items()} == {
        f"momentum_buffer/{name}": value.shape for name, value in weights.items()
    }
    with pytest.raises(RequestError, match=r"trained under other settings: optimizer: sgd ≠ None \("):
        train(tmp_path, latents, "killed", max_steps=7)


@pytest.mark.usefixtures("sgd")
def test_the_planner_asks_the_optimizer() -> None:
    assert (optimizer_class("adamw").step_bytes(), optimizer_class("sgd").step_bytes()) == (28, 20)
    assert checkpoint_bytes(10, ema=True, state_bytes=SgdConfig.state_bytes) == 120
    assert Plan(optimizer="sgd").optimizer == "sgd"
    with pytest.raises(ValueError, match=r"there is no optimizer of kind sdg \(did you mean sgd\?\); choose one of"):
        Plan(optimizer="sdg")
