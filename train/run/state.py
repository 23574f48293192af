"""The state of a run between steps, and how the results of steps are added to it."""

import math
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from shards.base.errors import WorkError
from train.objective.sums import LossSums
from train.run.alarm import AlarmConfig, AlarmState, update_alarm
from train.run.terminal import print_once


@dataclass
class TrainState:
    """Everything that one step passes to the next, besides the weights and the optimizer state."""

    step: int = 0
    """Number of completed optimizer steps."""
    losses: list[float] = field(default_factory=list)
    """Mean losses of the steps since the last line in metrics.jsonl, without non-finite values."""
    sums: LossSums = field(default_factory=lambda: LossSums.zeros(dtype=torch.float64))
    """Sums of the losses in `losses`, by quarter of the time axis."""
    alignments: list[float] = field(default_factory=list)
    """Mean alignment losses (REPA) of these steps, without non-finite values; empty if no layer is aligned."""
    skipped: int = 0
    """Number of steps that changed nothing because their gradient was not finite."""
    scaler: dict[str, Any] = field(default_factory=dict)
    """State of the loss scaler, if the run trains in float16."""
    alarm: AlarmState = field(default_factory=AlarmState)

    def begin_line(self) -> None:
        """Reset the values that each line of metrics.jsonl summarises."""
        self.losses.clear()
        self.alignments.clear()
        self.alarm.highest = None
        self.sums = LossSums.zeros(dtype=torch.float64)

    def copy(self) -> "TrainState":
        """Return a deep copy."""
        return deepcopy(self)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as stored in state.json, in which `sums` is named `quarters`."""
        fields = asdict(self)
        del fields["sums"]
        return fields | {"quarters": self.sums.to_json()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "TrainState":
        """Restore the result of `to_json`."""
        rest = {name: value for name, value in fields.items() if name not in ("quarters", "alarm")}
        sums, alarm = LossSums.from_json(fields["quarters"]), AlarmState(**fields["alarm"])
        return cls(**rest, sums=sums, alarm=alarm)


class StepResults:
    """The results of the steps since the last `collect`. Only `collect` makes the host wait for the device."""

    def __init__(self, accelerator: Accelerator, global_batch_size: int, max_skipped_steps: int, alarm: AlarmConfig):
        self.accelerator = accelerator
        self.global_batch_size = global_batch_size
        self.max_skipped_steps = max_skipped_steps
        self.alarm = alarm
        self.skipped: list[Tensor] = []
        self.sums: list[LossSums] = []
        self.aligned: list[Tensor] = []

    def add(self, skipped: Tensor, sums: LossSums, aligned: Tensor | None = None) -> None:
        """Add the results of a step. The tensors may stay on the device.

        Args:
            skipped: () 1 if the step was skipped, otherwise 0; the same on all ranks.
            sums: this rank's losses.
            aligned: () sum of this rank's alignment losses; None if no layer is aligned.
        """
        self.skipped.append(skipped)
        self.sums.append(sums)
        if aligned is not None:
            self.aligned.append(aligned)

    def collect(self, state: TrainState) -> None:
        """Add up the results over all ranks and move them to `state`. All ranks must call this.

        Raises:
            WorkError: more than `optimizer.max_skipped_steps` steps were skipped.
        """
        if not self.sums:
            return
        first = state.step - len(self.sums) + 1
        for number, step in enumerate(LossSums.stack(self.sums).reduce(self.accelerator).steps(), first):
            loss = step.total / self.global_batch_size
            if math.isfinite(loss):
                state.losses.append(loss)
                state.sums += step
                if warning := update_alarm(self.alarm, state.alarm, number, loss):
                    print_once(self.accelerator, warning)
        if self.aligned:
            totals: Tensor = self.accelerator.reduce(torch.stack(self.aligned).double(), "sum")
            means = totals.cpu() / self.global_batch_size
            state.alignments += [mean for mean in means.tolist() if math.isfinite(mean)]
            self.aligned.clear()
        scaler = self.accelerator.scaler
        # float16 overflows are expected while the loss scaler is still lowering its scale
        if scaler is None or scaler.get_scale() <= 1:
            state.skipped += int(torch.stack(self.skipped).sum())
        self.skipped.clear()
        self.sums.clear()
        if state.skipped > self.max_skipped_steps:
            raise WorkError(
                f"{state.skipped} steps up to step {state.step} had a non-finite loss or gradient, more than "
                f"optimizer.max_skipped_steps ({self.max_skipped_steps}). They did not change the weights. The same "
                f"command would repeat these steps, so lower optimizer.lr or choose a different precision (bfloat16, "
                f"float32)."
            )
