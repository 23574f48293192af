"""The learning rate schedule, and steps that are skipped."""

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from train.model.config import AdamWConfig, ScheduleConfig
from train.model.optimizer import Optimizer, learning_rate


@pytest.mark.parametrize(
    ("step", "kind", "expected"),
    [
        (0, "constant", 0.1),  # the first step has a learning rate above 0
        (4, "constant", 0.5),
        (9, "constant", 1.0),  # end of warm-up
        (10, "constant", 1.0),
        (10_000, "constant", 1.0),
        (10, "cosine", 1.0),
        (55, "cosine", 0.5),
        (99, "cosine", 0.5 * (1 + math.cos(math.pi * 89 / 90))),
        (200, "cosine", 0.0),
    ],
)
def test_learning_rate(step: int, kind: str, expected: float) -> None:
    config = ScheduleConfig(kind=kind, warmup_steps=10)
    assert learning_rate(step, 1.0, config, 100) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("build", [partial(torch.optim.AdamW, fused=True), partial(torch.optim.SGD, momentum=0.9)])
def test_a_step_with_a_non_finite_gradient_changes_nothing(build: Callable[..., torch.optim.Optimizer]) -> None:
    """The kernel decides in a fused optimizer, the host in others."""
    model = nn.Linear(2, 2)
    torch_optimizer = build(model.parameters(), lr=0.1)
    optimizer = Optimizer(torch_optimizer, Accelerator(cpu=True), AdamWConfig(), ScheduleConfig(warmup_steps=0), 10)

    def step(factor: float) -> float:
        (factor * model(torch.ones(1, 2))).sum().backward()
        return float(optimizer.step(model, 0)[1])

    assert step(1.0) == 0
    before = deepcopy([model.state_dict(), torch_optimizer.state_dict()["state"]])
    assert step(math.inf) == 1
    torch.testing.assert_close([model.state_dict(), torch_optimizer.state_dict()["state"]], before, rtol=0, atol=0)
    assert step(1.0) == 0 and not model.weight.equal(before[0]["weight"])
