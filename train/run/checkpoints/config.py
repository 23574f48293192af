"""Config of checkpoints. This module must not import torch."""

from pydantic import Field

from train.run.checkpoints.retention import KeepConfig


class CheckpointConfig(KeepConfig):
    """When and how the run is saved."""

    every: int = Field(1000, ge=1)
    """Steps between checkpoints; the last step is always saved."""
    asynchronous: bool = True
    """Copy the tensors to host memory, and write them in the background, one checkpoint at a time."""
    grace: float = Field(120.0, gt=0)
    """The scheduler's seconds from the stop signal to the kill. A run that saves more slowly prints a warning."""
    tag: str | None = None
    """Name of the phase in checkpoints and messages; null: the name of the run folder."""
