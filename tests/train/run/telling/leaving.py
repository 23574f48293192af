"""A run that is told to leave."""

import os
import signal
from typing import Any

import pytest

from train import loop
from train.run import processes


def leaves_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The run is told to leave in its step of that number, and hears of it after it."""
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.0)
    take_step = loop.take_step

    def told(run: loop.Run, batch: Any) -> None:
        take_step(run, batch)
        if run.state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop, "take_step", told)
