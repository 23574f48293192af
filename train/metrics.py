"""Fields of a line in metrics.jsonl, accumulated over the steps since the previous line."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from train.data.batch import Batch
from train.model.ema import ema_decay
from train.run.health.meter import Interval, Meter, peak_memory
from train.run.state import StepResults, TrainState
from train.step import StepResult, TrainStep


@dataclass
class Metrics:
    """Losses, throughput and other metrics of the steps since the last log line. See docs/reference/logs.md."""

    train_step: TrainStep
    state: TrainState
    results: StepResults
    meter: Meter
    global_batch_size: int
    steps_per_epoch: int
    peak_tflops: float | None
    """Peak throughput of one device, from which MFU is computed. None: unknown, so MFU is null."""
    grad_norm: Tensor | None = field(default=None, init=False)
    """Gradient norm of the last step, a scalar on the device."""

    def add(self, batch: Batch, result: StepResult) -> None:
        """Add the result of a step, without waiting for the device.

        Args:
            batch: this rank's share of the global batch.
        """
        self.results.add(result.skipped, result.sums, result.alignment)
        self.meter.count(batch)
        self.grad_norm = result.grad_norm

    def collect(self) -> None:
        """Update the state with the results added since the last call. Waits for the device; all ranks must call it.

        Raises:
            WorkError: more steps were skipped than `optimizer.max_skipped_steps`.
        """
        self.results.collect(self.state)

    def line_fields(self) -> dict[str, Any]:
        """Return the fields of a line in metrics.jsonl. Call `collect` first, and `begin_line` after writing the line.

        The time between this call and `begin_line`, in which validation runs, counts towards no line's throughput.
        """
        assert self.grad_norm is not None
        state = self.state
        return {
            "loss": mean(state.losses),
            "loss_by_quarter": state.sums.means(self.train_step.loss.path.num_train_timesteps),
            "loss_z": state.alarm.highest,
            "alarms": len(state.alarm.steps),
            "alarm_step": state.alarm.steps[-1] if state.alarm.steps else None,
            **self._alignment_fields(),
            "skipped_steps": state.skipped,
            "grad_norm": float(self.grad_norm),
            "lr": self.train_step.optimizer.lr,
            **self._speed_fields(self.meter.measure()),
            "epoch": round(state.step / self.steps_per_epoch, 4),
            **self._ema_fields(),
        }

    def begin_line(self) -> None:
        """Start accumulating the next line."""
        self.state.begin_line()
        self.meter.restart()

    def _alignment_fields(self) -> dict[str, float | None]:
        """Return the mean alignment loss (REPA) and its coefficient in the last step, or nothing without alignment."""
        aligned = self.train_step.aligned
        if aligned is None:
            return {}
        return {
            "repa_loss": mean(self.state.alignments),
            "repa_weight": aligned.config.coefficient(self.state.step - 1),
        }

    def _speed_fields(self, interval: Interval) -> dict[str, float | None]:
        accelerator = self.train_step.accelerator
        rate, mfu = interval.rate(self.global_batch_size), interval.mfu(self.peak_tflops)
        return {
            "images_per_second": round(rate, 3),
            "images_per_second_per_gpu": round(rate / accelerator.num_processes, 3),
            "mfu": None if mfu is None else round(mfu, 4),
            "memory_gb": round(peak_memory(accelerator.device) / 2**30, 3),
            "data_wait": round(interval.data_seconds / interval.seconds, 4),
        }

    def _ema_fields(self) -> dict[str, bool | float | None]:
        ema = self.train_step.ema
        if ema is None or ema.average is None:
            return {"ema": False, "ema_decay": None}
        return {"ema": True, "ema_decay": ema_decay(ema.config, self.state.step)}


def mean(values: list[float]) -> float | None:
    """Return the mean, or None if there are no values because no step had a finite loss."""
    return sum(values) / len(values) if values else None
