"""Small arithmetic: learning rate, moving average, smoothing, JSON lines."""

import math
from pathlib import Path

import pytest
import torch

from train.config import ScheduleConfig
from train.ema import Ema
from train.metrics import JsonLines, read_json_lines
from train.plot import smooth
from train.schedule import learning_rate


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
    config = ScheduleConfig(kind=kind, warmup_steps=10)  # type: ignore[arg-type]
    assert learning_rate(step, 1.0, config, 100) == pytest.approx(expected, abs=1e-12)


def test_moving_average_is_the_recursion() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(5, generator=generator) for _ in range(20)]
    ema = Ema({"w": weights[0]}, decay=0.9)
    expected = weights[0].double()
    for weight in weights[1:]:
        ema.update({"w": weight})
        expected = 0.9 * expected + 0.1 * weight.double()
    torch.testing.assert_close(ema.average["w"].double(), expected, rtol=1e-6, atol=1e-6)


def test_smoothing_has_no_bias_at_its_start() -> None:
    assert smooth([3.0] * 5, 0.9) == pytest.approx([3.0] * 5)
    assert smooth([1.0, 2.0], 0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 2) / 0.75])


def test_a_resumed_log_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    log = JsonLines(path, 0)
    for step in range(1, 6):
        log.write(step=step, loss=1.0 / step)
    log.file.write('{"step": 6, "lo')  # killed while writing
    log.file.close()
    log = JsonLines(path, 3)
    log.write(step=4, loss=0.25)
    assert [row["step"] for row in read_json_lines(path)] == [1, 2, 3, 4]
