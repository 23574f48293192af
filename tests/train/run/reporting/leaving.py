"""A run that receives a stop signal."""

import os
import signal
from typing import Any

import pytest

from train.run import processes
from train.step import StepResult, TrainStep


def leaves_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Send the run a stop signal in its step number `step` (the first is 1), which it must notice after that step."""
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.0)
    train_step = TrainStep.__call__

    def signalled(self: TrainStep, batch: Any, number: int) -> StepResult:
        result = train_step(self, batch, number)
        if number + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(TrainStep, "__call__", signalled)
