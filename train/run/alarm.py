"""The loss alarm: steps whose mean loss leaps out of what the steps before had are told of, and nothing is changed."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import Field

from shards.base.config import Config

MAD_TO_STD = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""


class AlarmConfig(Config):
    """Tells of steps whose mean loss leaps, and keeps the checkpoint before each; nothing is rewound."""

    window: int = Field(200, ge=10, le=10_000)
    """Steps before it that a step is held against; there is no alarm until half as many are done."""
    threshold: float | None = Field(10.0, gt=0)
    """Robust standard deviations above their median at which it is one; null: no alarm."""


@dataclass
class AlarmState:
    """What the alarm remembers; a checkpoint carries it, so a resumed run alarms at the same steps."""

    losses: list[float] = field(default_factory=list)
    """Of the last `window` steps whose loss was finite."""
    steps: list[int] = field(default_factory=list)
    """Every step at which it went off."""
    highest: float | None = None
    """Robust z of the highest step since the last line of metrics.jsonl; None: too few steps were done before."""
    sounding: bool = False
    """Whether the last step was above the threshold: one alarm for each leap, however long it lasts."""


def robust_z(value: float, before: Sequence[float]) -> float:
    """(value − median) / (1.4826·MAD) of `before` (Iglewicz and Hoaglin, 1993); 0 where half of them are alike."""
    median = statistics.median(before)
    spread = MAD_TO_STD * statistics.median(abs(loss - median) for loss in before)
    return (value - median) / spread if spread else 0.0


class Alarm:
    """Hears the mean loss of each step, in order."""

    def __init__(self, config: AlarmConfig):
        self.config = config

    def hear(self, state: AlarmState, step: int, loss: float) -> str | None:
        """Take note of a step's finite mean loss; returns what is to be said, where it is the first of a leap."""
        window, threshold = self.config.window, self.config.threshold
        if threshold is None:
            return None
        said = None
        if 2 * len(state.losses) >= window:
            z = robust_z(loss, state.losses)
            state.highest = z if state.highest is None else max(z, state.highest)
            if z > threshold and not state.sounding:
                state.steps.append(step)
                said = (
                    f"alarm: the mean loss of step {step} is {loss:.4g}, {z:.1f} robust standard deviations above "
                    f"{statistics.median(state.losses):.4g}, the median of the {len(state.losses)} steps before "
                    f"(alarm.threshold {threshold:g}). The run goes on, and the checkpoint before it is kept."
                )
            state.sounding = z > threshold
        state.losses = [*state.losses, loss][-window:]
        return said
