"""The state of a run between steps."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from train.objective.sums import LossSums
from train.run.alarm import AlarmState


@dataclass
class TrainState:
    """Everything that one step passes to the next, apart from the weights and the optimizer state."""

    step: int = 0
    """Number of completed optimizer steps."""
    losses: list[float] = field(default_factory=list)
    """Mean losses of the steps since the last line in metrics.jsonl, without non-finite values."""
    sums: LossSums = field(default_factory=lambda: LossSums.zeros(dtype=torch.float64))
    """Sums of the sample losses behind `losses`, by quarter of the time axis."""
    alignments: list[float] = field(default_factory=list)
    """Mean alignment losses (REPA) of the same steps, without non-finite values; empty if no layer is aligned."""
    grad_norms: list[float] = field(default_factory=list)
    """Gradient norms of the same steps before clipping, without non-finite values."""
    skipped: int = 0
    """Number of steps that were skipped because their gradient was not finite."""
    recent_skips: list[int] = field(default_factory=list)
    """Numbers of the steps that were skipped recently enough to count towards `optimizer.max_skipped_steps`."""
    scaler: dict[str, Any] = field(default_factory=dict)
    """State of the loss scaler, if the run trains in float16."""
    alarm: AlarmState = field(default_factory=AlarmState)

    def begin_line(self) -> None:
        """Reset the values that each line of metrics.jsonl summarizes."""
        self.losses.clear()
        self.grad_norms.clear()
        self.alignments.clear()
        self.alarm.highest = None
        self.sums = LossSums.zeros(dtype=torch.float64)

    def to_json(self) -> dict[str, Any]:
        """Return the fields in the form of state.json, where `sums` is named `quarters`."""
        fields = asdict(self)
        del fields["sums"]
        return fields | {"quarters": self.sums.to_json()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "TrainState":
        """Rebuild the state from the output of `to_json`."""
        rest = {name: value for name, value in fields.items() if name not in ("quarters", "alarm")}
        sums, alarm = LossSums.from_json(fields["quarters"]), AlarmState(**fields["alarm"])
        return cls(**rest, sums=sums, alarm=alarm)
