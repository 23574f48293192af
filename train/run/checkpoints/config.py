"""Config for checkpoints. This module must not import torch."""

from pydantic import Field

from train.run.checkpoints.retention import KeepConfig


class CheckpointConfig(KeepConfig):
    """When and how the run is saved."""

    every: int = Field(1000, ge=1)
    """Steps between checkpoints; the last step is always saved."""
    asynchronous: bool = True
    """Copy the tensors to host memory, and write them in the background, one checkpoint at a time."""
    grace: float = Field(120.0, gt=0)
    """Number of seconds that the scheduler allows between the stop signal and SIGKILL. A run that may need longer to
    stop prints a warning."""
    tag: str | None = None
    """Name of the phase in checkpoints and messages; null: the name of the run folder."""
