"""The `checkpoint` section of the config, and the rules that decide which checkpoints are kept.

This module must not import torch.
"""

from collections.abc import Iterable, Mapping

from pydantic import Field

from shards.base.config import Config


class CheckpointConfig(Config):
    """Schedule and retention of checkpoints. A checkpoint is kept if at least one of `keep`, `keep_every` and
    `keep_hours` applies to it."""

    keep: int = Field(3, ge=1)
    """Number of the newest checkpoints to keep."""
    keep_every: int | None = Field(None, ge=1)
    """Permanently keep checkpoints whose step is divisible by this number."""
    keep_hours: float | None = Field(None, gt=0)
    """Keep checkpoints younger than this number of hours; null: age does not matter."""
    every: int = Field(1000, ge=1)
    """Steps between checkpoints; the last step is always saved."""
    asynchronous: bool = True
    """Copy the tensors to host memory and write them in the background, one checkpoint at a time."""
    grace: float = Field(120.0, gt=0)
    """Seconds that the scheduler allows between the stop signal and SIGKILL. A run that may need longer to stop prints
    a warning."""
    tag: str | None = None
    """Name of the phase in checkpoints and messages; null: the name of the run folder."""


def superfluous(ages: Mapping[int, float], config: CheckpointConfig, alarms: Iterable[int]) -> list[int]:
    """Return the steps of the checkpoints to remove, in ascending order.

    Args:
        ages: step of each checkpoint → seconds since it was written.
        alarms: steps that raised a loss alarm.
    """
    steps = sorted(ages)
    kept = set(steps[-config.keep :]) | before_alarms(steps, alarms)
    if config.keep_every is not None:
        kept |= {step for step in steps if step % config.keep_every == 0}
    if config.keep_hours is not None:
        kept |= {step for step in steps if ages[step] < 3600 * config.keep_hours}
    return [step for step in steps if step not in kept]


def before_alarms(steps: list[int], alarms: Iterable[int]) -> set[int]:
    """Return the step of the last sound checkpoint before each loss alarm.

    The loss of step s is computed with the weights after step s − 1, which may already be bad, so only the checkpoints
    up to step s − 2 are considered sound. If there are none, a checkpoint at step s − 1 is better than nothing.

    Args:
        steps: steps of the checkpoints, in ascending order.
        alarms: steps that raised a loss alarm.
    """
    found = set()
    for alarm in alarms:
        earlier = [step for step in steps if step < alarm]
        sound = [step for step in earlier if step < alarm - 1]
        found |= set(sound[-1:] or earlier[-1:])
    return found
