"""The loss alarm: a planted leap is found, noise and drift are not, and the checkpoint before it stays."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from tests.runs import train_fields, write_config
from train.__main__ import run as command
from train.data.batch import Batch
from train.data.draws import Draws
from train.objective.loss import DiffusionLoss, NoisyBatch
from train.run.alarm import Alarm, AlarmConfig, AlarmState, robust_z
from train.run.checkpoints.checkpoint import list_checkpoints, newest_checkpoint, step_of
from train.run.checkpoints.retention import before_alarms
from train.run.reporting.json_lines import read_json_lines

LEAP = 11
STEPS = 600


def alarms(losses: Any, **fields: Any) -> list[int]:
    """Steps at which it goes off; the first loss is step 1's."""
    alarm, state = Alarm(AlarmConfig(**fields)), AlarmState()
    said = [alarm.hear(state, step, float(loss)) for step, loss in enumerate(losses, start=1)]
    assert [step for step, text in enumerate(said, start=1) if text] == state.steps
    return state.steps


@given(arrays.arrays(np.float64, st.integers(5, 60), elements=st.floats(-1e3, 1e3)), st.floats(-1e3, 1e3))
def test_robust_z_is_scipys(before: np.ndarray, value: float) -> None:
    spread = stats.median_abs_deviation(before, scale=1 / 1.4826)
    if 0 < spread < 1e-9:
        return  # of rounding alone
    expected = (value - np.median(before)) / spread if spread else 0.0
    assert robust_z(value, before.tolist()) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def course(seed: int, kind: str, drift: float) -> np.ndarray:
    """The mean losses of a run: a fall from 1 to 0.2, noise of 2 %, and a rise of `drift` of the noise per step."""
    rng, step = np.random.default_rng(seed), np.arange(STEPS)
    noise = {
        "normal": rng.standard_normal(STEPS),
        # of few samples at random timesteps: skewed, with a standard deviation of 1
        "gamma": (rng.gamma(4.0, size=STEPS) - 4.0) / 2.0,
    }[kind]
    fall = 0.2 + 0.8 * np.exp(-step / 20)
    return fall * (1 + 0.02 * noise) + 0.2 * 0.02 * drift * step


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.sampled_from(["normal", "gamma"]), st.integers(300, STEPS - 1), st.floats(0, 0.005))
def test_a_planted_leap_is_found_once_at_its_step(seed: int, kind: str, at: int, drift: float) -> None:
    losses = course(seed, kind, drift)
    losses[at : at + 3] += 20 * 0.02 * losses[at]  # 20 standard deviations, for three steps
    assert alarms(losses) == [at + 1]


def test_noise_and_drift_raise_fewer_than_one_alarm_in_20_000_steps() -> None:
    """Over 48,000 steps of two kinds of noise, with falls, without and with a slow rise."""
    found = [
        len(alarms(course(seed, kind, drift)))
        for seed in range(20)
        for kind in ("normal", "gamma")
        for drift in (0.0, 0.005)
    ]
    assert len(found) * STEPS == 48_000 and sum(found) <= 2
    # the test can tell: at 3 standard deviations there are many
    assert sum(len(alarms(course(seed, "gamma", 0.0), threshold=3.0)) for seed in range(5)) > 5


def test_a_new_level_is_told_of_once_and_a_threshold_of_none_never() -> None:
    losses = course(0, "normal", 0.0)
    losses[400:] += 1.0
    assert alarms(losses) == [401] and alarms(losses, threshold=None) == []
    assert alarms(np.ones(STEPS)) == []  # no spread, no measure


def test_what_is_said() -> None:
    alarm, state = Alarm(AlarmConfig(window=10)), AlarmState()
    for step, loss in enumerate([1.0, 1.1, 0.9, 1.0, 1.2], start=1):
        assert alarm.hear(state, step, loss) is None and state.highest is None
    said = alarm.hear(state, 6, 5.0)
    assert said is not None and said.startswith(
        "alarm: the mean loss of step 6 is 5, 27.0 robust standard deviations above 1, the median of the 5 steps before"
    )
    assert "(alarm.threshold 10). The run goes on, and the checkpoint before it is kept." in said


@pytest.mark.parametrize(
    ("steps", "alarms", "kept"),
    [
        ([2, 4, 6], [], set()),
        ([2, 4, 6], [6], {4}),  # step 5 made the weights that step 6 scored
        ([2, 4, 6], [7], {4}),  # and step 6 those of step 7
        ([2, 4, 6], [8], {6}),
        ([2, 4, 6], [5, 8], {2, 6}),
        ([6], [7], {6}),  # better than nothing
        ([6], [3], set()),
    ],
)
def test_which_checkpoint_is_before_an_alarm(steps: list[int], alarms: list[int], kept: set[int]) -> None:
    assert before_alarms(steps, alarms) == kept


def test_a_run_tells_of_it_keeps_the_checkpoint_and_resumes_to_the_same(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A target 30 times as large at one step; once through, and once in two parts."""
    add_noise = DiffusionLoss.add_noise

    def sometimes(self: DiffusionLoss, batch: Batch, draws: Draws) -> NoisyBatch:
        noisy = add_noise(self, batch, draws)
        return replace(noisy, target=noisy.target * (30.0 if draws.step == LEAP - 1 else 1.0))

    monkeypatch.setattr(DiffusionLoss, "add_noise", sometimes)
    changes = {"objective": {"prediction": "sample"}, "alarm": {"window": 10}, "optimizer": {"lr": 1e-6}}
    changes |= {"checkpoint": {"every": 2, "keep": 2}, "log": {"every": 3}}
    lines = []
    for name, parts in (("whole", [18]), ("parts", [10, 18])):
        for max_steps in parts:
            fields = train_fields(latents, tmp_path / name, max_steps=max_steps, **changes)
            command(["--config", str(write_config(tmp_path, fields))])
        assert capsys.readouterr().out.count(f"alarm: the mean loss of step {LEAP} is") == 1
        assert [step_of(folder) for folder in list_checkpoints(tmp_path / name)] == [8, 16, 18]
        rows = read_json_lines(tmp_path / name / "metrics.jsonl")
        lines.append({row["step"]: (row["loss_z"], row["alarms"], row["alarm_step"]) for row in rows})
    assert lines[0][3] == (None, 0, None) and 0 < abs(lines[0][9][0]) < 10
    assert lines[0][12][0] > 10 and lines[0][12][1:] == (1, LEAP) == lines[0][18][1:]
    assert {step: lines[1][step] for step in lines[0]} == lines[0]
    whole, resumed = (newest_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert whole is not None and resumed is not None and whole.state.alarm == resumed.state.alarm
    assert whole.content["files"] == resumed.content["files"]
