"""Where a run stands, and how it comes to know what its steps gave."""

import math
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from shards.base.errors import WorkError
from train.objective.sums import LossSums
from train.run.alarm import Alarm, AlarmState
from train.run.terminal import print_once


@dataclass
class TrainState:
    """What a run carries from step to step besides weights and optimizer."""

    step: int = 0
    """Optimizer steps done."""
    losses: list[float] = field(default_factory=list)
    """Mean loss of each step since the last line of metrics.jsonl."""
    sums: LossSums = field(default_factory=lambda: LossSums.zeros(dtype=torch.float64))
    """Of the same steps, by quarter of the time axis."""
    alignments: list[float] = field(default_factory=list)
    """Mean alignment loss of the same steps, where a layer is aligned."""
    skipped: int = 0
    """Steps whose gradient was not finite, which changed nothing."""
    scaler: dict[str, Any] = field(default_factory=dict)
    """The loss scaler's state, in float16."""
    alarm: AlarmState = field(default_factory=AlarmState)

    def begin_line(self) -> None:
        """Forget what the last line of metrics.jsonl has said."""
        self.losses.clear()
        self.alignments.clear()
        self.alarm.highest = None
        self.sums = LossSums.zeros(dtype=torch.float64)

    def copy(self) -> "TrainState":
        """As it is now."""
        return deepcopy(self)

    def to_json(self) -> dict[str, Any]:
        """As state.json has it, where the sums are called `quarters`."""
        fields = asdict(self)
        del fields["sums"]
        return fields | {"quarters": self.sums.to_json()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "TrainState":
        """What `to_json` gave."""
        rest = {name: value for name, value in fields.items() if name not in ("quarters", "alarm")}
        sums, alarm = LossSums.from_json(fields["quarters"]), AlarmState(**fields["alarm"])
        return cls(**rest, sums=sums, alarm=alarm)


class StepResults:
    """What steps gave, on the device until `collect`: the host waits for it there, and nowhere else."""

    def __init__(self, accelerator: Accelerator, global_batch_size: int, max_skipped_steps: int, alarm: Alarm):
        self.accelerator = accelerator
        self.global_batch_size = global_batch_size
        self.max_skipped_steps = max_skipped_steps
        self.alarm = alarm
        self.skipped: list[Tensor] = []
        self.sums: list[LossSums] = []
        self.aligned: list[Tensor] = []

    def add(self, skipped: Tensor, sums: LossSums, aligned: Tensor | None = None) -> None:
        """Of one step: whether it was skipped, alike on all ranks, and this rank's losses, also of the alignment."""
        self.skipped.append(skipped)
        self.sums.append(sums)
        if aligned is not None:
            self.aligned.append(aligned)

    def collect(self, state: TrainState) -> None:
        """Bring `state` up to date over all ranks, each of which must call this.

        Raises:
            WorkError: more steps were skipped than `optimizer.max_skipped_steps`.
        """
        if not self.sums:
            return
        first = state.step - len(self.sums) + 1
        for number, step in enumerate(LossSums.stack(self.sums).reduce(self.accelerator).steps(), first):
            loss = step.total / self.global_batch_size
            if math.isfinite(loss):
                state.losses.append(loss)
                state.sums += step
                if said := self.alarm.hear(state.alarm, number, loss):
                    print_once(self.accelerator, said)
        if self.aligned:
            totals: Tensor = self.accelerator.reduce(torch.stack(self.aligned).double(), "sum")
            means = totals.cpu() / self.global_batch_size
            state.alignments += [mean for mean in means.tolist() if math.isfinite(mean)]
            self.aligned.clear()
        scaler = self.accelerator.scaler
        if scaler is None or scaler.get_scale() <= 1:  # above, a float16 overflow is the scaler finding its scale
            state.skipped += int(torch.stack(self.skipped).sum())
        self.skipped.clear()
        self.sums.clear()
        if state.skipped > self.max_skipped_steps:
            raise WorkError(
                f"{state.skipped} steps up to step {state.step} had a loss or gradient that is not finite, more "
                f"than optimizer.max_skipped_steps. Nothing of them is in the weights. Lower optimizer.lr, or use "
                f"another precision (bfloat16, float32); the same run would meet the same steps again."
            )
