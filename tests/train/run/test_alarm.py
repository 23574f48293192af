"""The loss alarm: it detects a planted spike, ignores noise and drift, and keeps the checkpoint before the spike."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from tests.runs import train_run
from train.data.batch import Batch
from train.data.draws import Draws
from train.objective.loss import DiffusionLoss, NoisyBatch
from train.run.alarm import AlarmConfig, AlarmState, robust_z, update_alarm
from train.run.checkpoints.checkpoint import list_checkpoints, newest_checkpoint, step_of
from train.run.checkpoints.retention import before_alarms
from train.run.reporting.json_lines import read_json_lines

pytestmark = pytest.mark.heavy

SPIKE = 11
STEPS = 600


def alarms(losses: Any, **fields: Any) -> list[int]:
    """Return the steps that raise an alarm. The first loss is that of step 1."""
    config, state = AlarmConfig(**fields), AlarmState()
    warnings = [update_alarm(config, state, step, float(loss)) for step, loss in enumerate(losses, start=1)]
    assert [step for step, warning in enumerate(warnings, start=1) if warning] == state.steps
    return state.steps


@given(arrays.arrays(np.float64, st.integers(5, 60), elements=st.floats(-1e3, 1e3)), st.floats(-1e3, 1e3))
def test_robust_z_equals_scipys(before: np.ndarray, value: float) -> None:
    std = stats.median_abs_deviation(before, scale=1 / 1.4826)
    if 0 < std < 1e-9:
        return  # it consists of rounding errors
    expected = (value - np.median(before)) / std if std else 0.0
    assert robust_z(value, before.tolist()) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def simulated_losses(seed: int, kind: str, drift: float) -> np.ndarray:
    """Return the mean losses of a run: a fall from 1 to 0.2, and noise with a standard deviation of 2 %.

    Args:
        kind: distribution of the noise.
        drift: slow rise of the loss per step, in standard deviations of the noise.
    """
    rng, step = np.random.default_rng(seed), np.arange(STEPS)
    noise = {
        "normal": rng.standard_normal(STEPS),
        # a batch of few samples at random timesteps has a skewed loss; scaled to a standard deviation of 1
        "gamma": (rng.gamma(4.0, size=STEPS) - 4.0) / 2.0,
    }[kind]
    fall = 0.2 + 0.8 * np.exp(-step / 20)
    return fall * (1 + 0.02 * noise) + 0.2 * 0.02 * drift * step


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.sampled_from(["normal", "gamma"]), st.integers(300, STEPS - 1), st.floats(0, 0.005))
def test_a_planted_spike_raises_one_alarm_at_its_first_step(seed: int, kind: str, at: int, drift: float) -> None:
    losses = simulated_losses(seed, kind, drift)
    losses[at : at + 3] += 20 * 0.02 * losses[at]  # 20 standard deviations, for three steps
    assert alarms(losses) == [at + 1]


def test_noise_and_drift_raise_fewer_than_one_alarm_in_20_000_steps() -> None:
    """48,000 simulated steps, with both kinds of noise, with and without drift."""
    found = [
        len(alarms(simulated_losses(seed, kind, drift)))
        for seed in range(20)
        for kind in ("normal", "gamma")
        for drift in (0.0, 0.005)
    ]
    assert len(found) * STEPS == 48_000 and sum(found) <= 2
    # the count is meaningful, because a threshold of 3 raises many alarms
    assert sum(len(alarms(simulated_losses(seed, "gamma", 0.0), threshold=3.0)) for seed in range(5)) > 5


def test_a_lasting_rise_raises_one_alarm_and_a_null_threshold_none() -> None:
    losses = simulated_losses(0, "normal", 0.0)
    losses[400:] += 1.0
    assert alarms(losses) == [401] and alarms(losses, threshold=None) == []
    assert alarms(np.ones(STEPS)) == []  # a MAD of 0


def test_the_warning_compares_the_loss_with_the_window() -> None:
    config, state = AlarmConfig(window=10), AlarmState()
    for step, loss in enumerate([1.0, 1.1, 0.9, 1.0, 1.2], start=1):
        assert update_alarm(config, state, step, loss) is None and state.highest is None
    assert update_alarm(config, state, 6, 5.0) == (
        "alarm: the mean loss of step 6 is 5, 27.0 robust standard deviations above 1, the median of the previous 5 "
        "steps (alarm.threshold 10). Training continues, and the checkpoint before the spike is kept."
    )


@pytest.mark.parametrize(
    ("steps", "alarms", "kept"),
    [
        ([2, 4, 6], [], set()),
        ([2, 4, 6], [6], {4}),
        ([2, 4, 6], [7], {4}),  # the loss of step 7 is that of the weights after step 6, which may be the cause
        ([2, 4, 6], [8], {6}),
        ([2, 4, 6], [5, 8], {2, 6}),
        ([6], [7], {6}),  # no earlier checkpoint exists
        ([6], [3], set()),
    ],
)
def test_the_checkpoint_before_an_alarm(steps: list[int], alarms: list[int], kept: set[int]) -> None:
    assert before_alarms(steps, alarms) == kept


def test_a_spike_keeps_a_checkpoint_and_a_resumed_run_raises_the_same_alarm(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At step SPIKE the target is 30 times as large. A run in two parts is compared with an uninterrupted one."""
    add_noise = DiffusionLoss.add_noise

    def add_noise_with_spike(self: DiffusionLoss, batch: Batch, draws: Draws) -> NoisyBatch:
        noisy = add_noise(self, batch, draws)
        return replace(noisy, target=noisy.target * (30.0 if draws.step == SPIKE - 1 else 1.0))

    monkeypatch.setattr(DiffusionLoss, "add_noise", add_noise_with_spike)
    changes = {"objective": {"prediction": "sample"}, "alarm": {"window": 10}, "optimizer": {"lr": 1e-6}}
    changes |= {"checkpoint": {"every": 2, "keep": 2}, "log": {"every": 3}}
    lines = []
    for name, parts in (("whole", [18]), ("parts", [10, 18])):
        for max_steps in parts:
            train_run(latents, tmp_path / name, max_steps=max_steps, **changes)
        assert capsys.readouterr().out.count(f"alarm: the mean loss of step {SPIKE} is") == 1
        assert [step_of(folder) for folder in list_checkpoints(tmp_path / name)] == [8, 16, 18]
        rows = read_json_lines(tmp_path / name / "metrics.jsonl")
        lines.append({row["step"]: (row["loss_z"], row["alarms"], row["alarm_step"]) for row in rows})
    assert lines[0][3] == (None, 0, None) and 0 < abs(lines[0][9][0]) < 10
    assert lines[0][12][0] > 10 and lines[0][12][1:] == (1, SPIKE) == lines[0][18][1:]
    assert {step: lines[1][step] for step in lines[0]} == lines[0]
    whole, resumed = (newest_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert whole is not None and resumed is not None and whole.state.alarm == resumed.state.alarm
    assert whole.content["files"] == resumed.content["files"]
