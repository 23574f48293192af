"""What a run says while it trains: metrics.jsonl, samples.jsonl, the tracker and the progress bar."""

import sys
import time

from accelerate.utils import gather_object
from torch import Tensor
from tqdm import tqdm

from train.batch import Batch
from train.metrics import JsonLines
from train.plot import plot_run
from train.run import Run, collect_losses


class Log:
    """metrics.jsonl, samples.jsonl, the tracker and the progress bar."""

    def __init__(self, run: Run):
        config, step = run.config, run.state.step
        self.run = run
        self.data_seconds = 0.0
        self.interval_start = time.perf_counter()
        self.interval_steps = 0
        self.main = run.accelerator.is_main_process
        self.metrics = JsonLines(config.run_dir / "metrics.jsonl", step) if self.main else None
        self.sample_lines = (
            JsonLines(config.run_dir / "samples.jsonl", step) if self.main and config.log.samples else None
        )
        quiet = not sys.stderr.isatty()
        self.bar = tqdm(
            total=config.max_steps, initial=step, disable=not self.main, unit="step", mininterval=15 if quiet else 0.5
        )
        if config.log.tracker != "none":
            run.accelerator.init_trackers("tracker")

    def samples(self, batch: Batch) -> None:
        """Write the keys of the global batch of the step about to be done, in global order."""
        if not self.run.config.log.samples:
            return
        pairs = gather_object(list(zip(batch.slots.tolist(), batch.keys, strict=True)))
        if self.sample_lines:
            self.sample_lines.write(step=self.run.state.step + 1, keys=[key for _, key in sorted(pairs)])

    def step(self, grad_norm: Tensor) -> None:
        """Count a step; at every `log.every`-th write a line. Only then does the host wait for the device."""
        run = self.run
        self.bar.update()
        self.interval_steps += 1
        if run.state.step % run.config.log.every and run.state.step != run.config.max_steps:
            return
        collect_losses(run)
        seconds = time.perf_counter() - self.interval_start
        loss = sum(run.state.losses) / len(run.state.losses) if run.state.losses else None
        fields = {
            "loss": loss,
            "skipped_steps": run.state.skipped,
            "grad_norm": float(grad_norm) if grad_norm.isfinite() else None,
            "lr": run.optimizer.param_groups[0]["lr"],
            "images_per_second": round(self.interval_steps * run.config.global_batch_size / seconds, 3),
            "data_wait": round(self.data_seconds / seconds, 4),
            "epoch": round(run.state.step / run.request.spec.steps_per_epoch, 4),
            "ema": run.ema is not None,
        }
        if run.request.validation is not None and run.state.step % run.config.validation.every == 0:
            fields |= run.request.validation(run.unet, run.loss, run.accelerator)
        run.state.losses.clear()
        self.data_seconds, self.interval_steps, self.interval_start = 0.0, 0, time.perf_counter()
        if self.metrics:
            self.metrics.write(step=run.state.step, **fields)
            self.bar.set_postfix(loss=loss)
        numbers = {key: value for key, value in fields.items() if isinstance(value, int | float)}
        run.accelerator.log(numbers, step=run.state.step)

    def close(self) -> None:
        """Finish the tracker and draw loss.png."""
        self.bar.close()
        self.run.accelerator.end_training()
        if self.main:
            plot_run(self.run.config.run_dir)
