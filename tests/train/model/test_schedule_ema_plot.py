"""Small arithmetic: learning rate, moving average, smoothing, JSON lines."""

import math
from pathlib import Path

import pytest
import torch

from train.model.ema import Ema, EmaConfig, power_exponent
from train.model.optimizer import ScheduleConfig, learning_rate
from train.run.metrics import JsonLines, read_json_lines
from train.run.plot import smooth


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


def averages(ema: Ema) -> dict[str, torch.Tensor]:
    assert ema.average is not None
    return ema.average


def test_moving_average_is_the_recursion() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(5, generator=generator) for _ in range(20)]
    ema = Ema(EmaConfig(decay=0.9, start_step=3))
    ema.update({"w": weights[1]}.items(), 2)
    assert ema.average is None
    expected = weights[0].double()
    for step, weight in enumerate(weights, start=3):
        ema.update({"w": weight}.items(), step)
        expected = 0.9 * expected + 0.1 * weight.double()
    torch.testing.assert_close(averages(ema)["w"].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("start", [1, 7])
def test_power_average_weighs_step_tau_by_tau_to_the_gamma(start: int) -> None:
    """Against the profile itself in float64; where it starts late, the first weights stand for all before them."""
    config = EmaConfig(kind="power", sigma_rel=0.1, start_step=start)
    generator = torch.Generator().manual_seed(0)
    weights = {step: torch.randn(5, generator=generator) for step in range(start, 61)}
    ema = Ema(config)
    for step in range(start, 61):
        ema.update({"w": weights[step]}.items(), step)
    gamma = power_exponent(0.1)
    # the share of step τ among 60: (τ/60)^(γ + 1) − ((τ − 1)/60)^(γ + 1), the integral of t^γ over its step
    up_to = {step: (step / 60) ** (gamma + 1) for step in range(start - 1, 61)}
    up_to[start - 1] = 0.0
    expected = sum((up_to[step] - up_to[step - 1]) * weights[step].double() for step in range(start, 61))
    torch.testing.assert_close(averages(ema)["w"].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sigma_rel", [0.01, 0.05, 0.1, 0.15, 0.25])
def test_power_exponent_gives_the_width(sigma_rel: float) -> None:
    gamma = power_exponent(sigma_rel)
    assert math.sqrt(gamma + 1) / ((gamma + 2) * math.sqrt(gamma + 3)) == pytest.approx(sigma_rel, rel=1e-9)
    # the width itself: the standard deviation of the density (γ + 1)·t^γ on [0, 1]
    mean, square = (gamma + 1) / (gamma + 2), (gamma + 1) / (gamma + 3)
    assert math.sqrt(square - mean**2) == pytest.approx(sigma_rel, rel=1e-6)


def test_power_exponents_are_the_published_ones() -> None:
    """EDM2's own names for its two averages: γ = 16.97 has a width of 5 %, γ = 6.94 one of 10 %."""
    assert (round(power_exponent(0.05), 2), round(power_exponent(0.1), 2)) == (16.97, 6.94)


def test_smoothing_has_no_bias_at_its_start() -> None:
    assert smooth([3.0] * 5, 0.9) == pytest.approx([3.0] * 5)
    assert smooth([1.0, 2.0], 0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 2) / 0.75])


def test_a_resumed_log_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    log = JsonLines(path, 0, tmp_path)
    for step in range(1, 6):
        log.write(step=step, loss=1.0 / step)
    log.file.write('{"step": 6, "lo')  # killed while writing
    log.file.close()
    log = JsonLines(path, 3, tmp_path)
    log.write(step=4, loss=0.25)
    assert [row["step"] for row in read_json_lines(path)] == [1, 2, 3, 4]
