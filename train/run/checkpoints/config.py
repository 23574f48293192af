"""Config of checkpoints, without torch: it is read first."""

from pydantic import Field

from train.run.checkpoints.retention import KeepConfig


class CheckpointConfig(KeepConfig):
    """When the run is saved."""

    every: int = Field(1000, ge=1)
    """Steps; the last step is always saved."""
    asynchronous: bool = True
    """Copy what is to be saved to the CPU's memory, and write it while training goes on; one at a time."""
    grace: float = Field(120.0, gt=0)
    """Seconds from the signal to leave to the kill, as the scheduler has it: a run that saves more slowly is warned."""
    tag: str | None = None
    """The phase's name, in the checkpoint and in messages; null: the run folder's name."""
