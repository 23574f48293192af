"""The fields of a line in metrics.jsonl, accumulated over the steps since the previous line."""

import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shards.base.device import device_module, is_accelerator
from shards.base.errors import WorkError
from train.data.batch import Batch
from train.model.ema import ema_decay
from train.objective.sums import LossSums
from train.run.alarm import AlarmConfig, update_alarm
from train.run.processes import print_once
from train.run.state import TrainState
from train.step import StepResult, TrainStep

SKIP_WINDOW = 10_000
"""Number of steps among which at most `optimizer.max_skipped_steps` may be skipped."""


@dataclass
class Metrics:
    """Losses, throughput and other metrics of the steps since the last log line. See docs/reference/logs.md."""

    train_step: TrainStep
    state: TrainState
    flops_per_image: dict[tuple[int, int], int]
    """Latent shape (h, w) → training FLOPs per image; empty: FLOPs are not counted."""
    global_batch_size: int
    max_skipped_steps: int
    alarm: AlarmConfig
    steps_per_epoch: int
    peak_tflops: float | None
    """Peak throughput of one device in TFLOP/s, from which MFU is computed; None: unknown, so MFU is null."""
    results: list[StepResult] = field(default_factory=list, init=False)
    """Results of the steps since the last `collect`."""

    def __post_init__(self) -> None:
        self._begin_interval()

    def add(self, batch: Batch, result: StepResult) -> None:
        """Add the result of a step, without waiting for the device.

        Args:
            batch: this rank's share of the global batch.
        """
        self.results.append(result)
        self.num_steps += 1
        height, width = batch.columns["image_latents"].shape[2:]
        self.flops += len(batch) * self.flops_per_image.get((height, width), 0)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time spent in this context as time spent waiting for data."""
        start = time.perf_counter()
        yield
        self.data_seconds += time.perf_counter() - start

    def collect(self) -> None:
        """Sum the results of the steps since the last call over all ranks, and add them to the state.

        This is the only method that makes the host wait for the device. All ranks must call it.

        Raises:
            WorkError: more of the last `SKIP_WINDOW` steps were skipped than `optimizer.max_skipped_steps`.
        """
        if not self.results:
            return
        results, self.results = self.results, []
        state, accelerator = self.state, self.train_step.accelerator
        first = state.step - len(results) + 1
        state.grad_norms += filter(math.isfinite, torch.stack([result.grad_norm for result in results]).tolist())
        sums = LossSums.stack([result.sums for result in results]).reduce(accelerator)
        for number, step in enumerate(sums.steps(), first):
            loss = step.total / self.global_batch_size
            if math.isfinite(loss):
                state.losses.append(loss)
                state.sums += step
                if warning := update_alarm(self.alarm, state.alarm, number, loss):
                    print_once(accelerator, warning)
        if aligned := [result.alignment for result in results if result.alignment is not None]:
            totals: Tensor = accelerator.reduce(torch.stack(aligned).double(), "sum")
            means = totals.cpu() / self.global_batch_size
            state.alignments += [mean for mean in means.tolist() if math.isfinite(mean)]
        # float16 overflows are expected while the loss scaler is still lowering its scale
        if accelerator.scaler is None or accelerator.scaler.get_scale() <= 1:
            flags = torch.stack([result.skipped for result in results]).tolist()
            skips = [number for number, is_skipped in enumerate(flags, first) if is_skipped]
            state.skipped += len(skips)
            state.recent_skips = [step for step in state.recent_skips + skips if step > state.step - SKIP_WINDOW]
        if len(state.recent_skips) > self.max_skipped_steps:
            raise WorkError(
                f"{len(state.recent_skips)} of the {min(state.step, SKIP_WINDOW):,} steps up to step {state.step} had "
                f"a non-finite loss or gradient, more than optimizer.max_skipped_steps ({self.max_skipped_steps}). "
                f"Skipped steps did not change the weights. The same command would repeat them, so lower optimizer.lr "
                f"or choose a different precision (bfloat16, float32). If the steps after the newest checkpoint still "
                f"fail, its weights may have diverged already: remove it (for a run at a URL, also its copy in "
                f"$TMPDIR), and the run resumes from the one before."
            )

    def line_fields(self) -> dict[str, Any]:
        """Return the fields of a line in metrics.jsonl. Call `collect` first, and `begin_line` after writing the line.

        The time between this call and `begin_line`, during which validation runs, is not part of any line's throughput.
        """
        state = self.state
        return {
            "loss": mean(state.losses),
            "loss_by_quarter": state.sums.means(self.train_step.loss.path.num_train_timesteps),
            "loss_z": state.alarm.highest,
            "alarms": len(state.alarm.steps),
            "alarm_step": state.alarm.steps[-1] if state.alarm.steps else None,
            **self._alignment_fields(),
            "skipped_steps": state.skipped,
            "grad_norm": max(state.grad_norms, default=math.nan),
            "lr": self.train_step.optimizer.lr,
            **self._speed_fields(),
            "epoch": round(state.step / self.steps_per_epoch, 4),
            **self._ema_fields(),
        }

    def begin_line(self) -> None:
        """Start accumulating values for the next line."""
        self.state.begin_line()
        self._begin_interval()

    def _begin_interval(self) -> None:
        """Begin the interval to which the throughput in the next line applies."""
        self.num_steps, self.start = 0, time.perf_counter()
        self.flops = 0
        """Model FLOPs for this rank's samples; 0 if FLOPs are not counted."""
        self.data_seconds = 0.0
        """Seconds of the interval spent waiting for batches."""

    def _alignment_fields(self) -> dict[str, float | None]:
        """Return the mean alignment loss (REPA) and its last coefficient, or no fields if no layer is aligned."""
        aligned = self.train_step.aligned
        if aligned is None:
            return {}
        return {
            "repa_loss": mean(self.state.alignments),
            "repa_weight": aligned.config.coefficient(self.state.step - 1),
        }

    def _speed_fields(self) -> dict[str, float | None]:
        accelerator, seconds = self.train_step.accelerator, time.perf_counter() - self.start
        rate = self.num_steps * self.global_batch_size / seconds
        # the model FLOPs utilization of Chowdhery et al. (2022)
        mfu = self.flops / seconds / (self.peak_tflops * 1e12) if self.peak_tflops else None
        return {
            "images_per_second": significant(rate),
            "images_per_second_per_gpu": significant(rate / accelerator.num_processes),
            "mfu": None if mfu is None else significant(mfu),
            "memory_gb": round(peak_memory(accelerator.device) / 2**30, 3),
            "data_wait": round(self.data_seconds / seconds, 4),
        }

    def _ema_fields(self) -> dict[str, bool | float | None]:
        ema = self.train_step.ema
        if ema is None or ema.average is None:
            return {"ema": False, "ema_decay": None}
        return {"ema": True, "ema_decay": ema_decay(ema.config, self.state.step)}


def peak_memory(device: torch.device) -> int:
    """Return the peak number of bytes allocated on the device, or this process's peak RSS if the device is the CPU."""
    if is_accelerator(device):
        return int(device_module().max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def significant(value: float) -> float:
    """Round to six significant digits, so that small numbers stay above 0, and ratios of two numbers stay accurate."""
    return float(f"{value:.6g}")


def mean(values: list[float]) -> float | None:
    """Return the mean of the values, or None if there are none because no step had a finite loss."""
    return sum(values) / len(values) if values else None
