"""Which checkpoints stay: the newest, the young, those of certain steps, and the one before each loss alarm."""

from collections.abc import Iterable, Mapping

from pydantic import Field

from shards.base.config import Config


class KeepConfig(Config):
    """Which checkpoints stay; each that any of these holds."""

    keep: int = Field(3, ge=1)
    """How many of the newest checkpoints are kept."""
    keep_every: int | None = Field(None, ge=1)
    """Checkpoints of steps that this divides are kept for good."""
    keep_hours: float | None = Field(None, gt=0)
    """Checkpoints that are younger than so many hours are kept, too; null: age does not matter."""


def superfluous(ages: Mapping[int, float], config: KeepConfig, alarms: Iterable[int]) -> list[int]:
    """Steps of the checkpoints to remove, ascending.

    Args:
        ages: step → seconds since it was written.
        alarms: steps of the loss alarms.
    """
    steps = sorted(ages)
    kept = set(steps[-config.keep :]) | before_alarms(steps, alarms)
    if config.keep_every is not None:
        kept |= {step for step in steps if step % config.keep_every == 0}
    if config.keep_hours is not None:
        kept |= {step for step in steps if ages[step] < 3600 * config.keep_hours}
    return [step for step in steps if step not in kept]


def before_alarms(steps: list[int], alarms: Iterable[int]) -> set[int]:
    """Of the `steps` of checkpoints, ascending, those before the loss alarms at steps `alarms`.

    The loss of step s is of the weights that step s − 1 made, which may be what is wrong: the checkpoint before it is
    of step s − 2 at most. Where there is none, one of s − 1 is better than nothing.
    """
    found = set()
    for alarm in alarms:
        earlier = [step for step in steps if step < alarm]
        sound = [step for step in earlier if step < alarm - 1]
        found |= set(sound[-1:] or earlier[-1:])
    return found
