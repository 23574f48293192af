"""Preemption of a training run inside a test's process."""

import os
import signal
from typing import Any

import pytest

from train.run import processes
from train.step import StepResult, TrainStep


def preempt_in_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Send SIGTERM during a step (the first is 1), and make the run check for signals after every step."""
    monkeypatch.setattr(processes, "CHECK_SECONDS", 0.0)
    train_step = TrainStep.__call__

    def interrupted(self: TrainStep, batch: Any, number: int) -> StepResult:
        result = train_step(self, batch, number)
        if number + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(TrainStep, "__call__", interrupted)
