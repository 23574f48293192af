"""The loss alarm: a warning when a step's mean loss spikes. It does not affect training."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import Field

from shards.base.config import Config

MAD_TO_STD = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation (MAD)."""


class AlarmConfig(Config):
    """Warnings about loss spikes. The checkpoint before each spike is kept; the run is never rewound."""

    window: int = Field(200, ge=10, le=10_000)
    """Number of previous steps with which each step's mean loss is compared. No alarm is raised until half that number
    of steps have been completed."""
    threshold: float | None = Field(10.0, gt=0)
    """A step raises an alarm if its mean loss exceeds the window's median by more than this many robust standard
    deviations; null: alarms are disabled."""


@dataclass
class AlarmState:
    """What the alarm remembers between steps. It is saved in checkpoints, so that a resumed run raises the same alarms
    as an uninterrupted one."""

    losses: list[float] = field(default_factory=list)
    """Mean losses of the last `window` steps whose loss was finite."""
    steps: list[int] = field(default_factory=list)
    """All steps that raised an alarm."""
    highest: float | None = None
    """Highest robust z-score of any step since the last line of metrics.jsonl; None: no score has been computed since
    then."""
    sounding: bool = False
    """Whether the last step was above the threshold. A spike over several steps raises a single alarm."""


def robust_z(value: float, before: Sequence[float]) -> float:
    """Return (value − median) / (1.4826·MAD), with the median and MAD of `before`, or 0 if the MAD is 0.

    The formula is from Iglewicz and Hoaglin (1993).
    """
    median = statistics.median(before)
    std = MAD_TO_STD * statistics.median(abs(loss - median) for loss in before)
    return (value - median) / std if std else 0.0


def update_alarm(config: AlarmConfig, state: AlarmState, step: int, loss: float) -> str | None:
    """Add a step's mean loss, which must be finite, to `state`. Steps must be added in order.

    Returns:
        A warning if the step raised an alarm, otherwise None.
    """
    if config.threshold is None:
        return None
    warning = None
    if 2 * len(state.losses) >= config.window:
        z = robust_z(loss, state.losses)
        state.highest = z if state.highest is None else max(z, state.highest)
        if z > config.threshold and not state.sounding:
            state.steps.append(step)
            warning = (
                f"alarm: the mean loss of step {step} is {loss:.4g}, {z:.1f} robust standard deviations above "
                f"{statistics.median(state.losses):.4g}, the median of the previous {len(state.losses)} steps "
                f"(alarm.threshold {config.threshold:g}). Training continues, and the checkpoint before the spike is "
                f"kept."
            )
        state.sounding = z > config.threshold
    state.losses = [*state.losses, loss][-config.window :]
    return warning
