"""The contents of a checkpoint, in memory."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from train.model.ema import Ema
from train.run.checkpoints.checkpoint import HEAD_NAME, OPTIMIZER_NAME, WEIGHTS_NAME, flatten, trained
from train.run.state import TrainState


@dataclass(frozen=True)
class Snapshot:
    """Contents of a checkpoint: the run's own tensors, or copies of them if training continues while it is written."""

    state: TrainState
    files: dict[str, dict[str, Tensor]]
    """File in the checkpoint's folder → tensors by name."""

    lines: Mapping[str, int] = field(default_factory=dict)
    """Name of each log file in the run folder → its size in bytes up to this step."""


def take_snapshot(
    state: TrainState,
    unet: Any,
    optimizer: Optimizer,
    averages: dict[str, Ema],
    head: nn.Module | None = None,
    lines: Mapping[str, int] | None = None,
) -> Snapshot:
    """Collect the current tensors of the run, without copying them.

    Args:
        head: the projection head, if a layer is aligned.
        lines: name of each log file in the run folder → its current size in bytes.
    """
    files = {f"unet/{WEIGHTS_NAME}": unet.state_dict(), OPTIMIZER_NAME: flatten(trained(unet, head), optimizer)}
    if head is not None:
        files[HEAD_NAME] = head.state_dict()
    return Snapshot(deepcopy(state), files | average_files(unet, averages), lines or {})


def average_files(
    unet: Any, averages: dict[str, Ema], dtype: torch.dtype = torch.float32
) -> dict[str, dict[str, Tensor]]:
    """Return the files of all averages that have started, as a dict from file to tensors by name.

    The averages are converted to `dtype`; the network's buffers are included unchanged.
    """
    files = {}
    for folder, ema in averages.items():
        if ema.average is not None:
            average = {name: value.to(dtype) for name, value in ema.average.items()}
            files[f"{folder}/{WEIGHTS_NAME}"] = unet.state_dict() | average
    return files
