"""The learning rate of a step."""

import math

import pytest

from train.model.config import ScheduleConfig
from train.model.optimizer import learning_rate


@pytest.mark.parametrize(
    ("step", "kind", "expected"),
    [
        (0, "constant", 0.1),  # the first step already learns
        (4, "constant", 0.5),
        (9, "constant", 1.0),  # warm-up ends
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
