"""Log of a training run: metrics.jsonl, samples.jsonl, the tracker and the progress bar."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from shards.base.errors import Preempted
from shards.base.progress import Progress
from shards.base.store import Place
from train.data.batch import Batch
from train.run.reporting.config import LogConfig
from train.run.reporting.evaluations import EvaluationQueue, is_logged_by_trainer
from train.run.reporting.json_lines import JsonLines, replace_non_finite
from train.run.reporting.plot import plot_run
from train.run.reporting.tracker import flatten_numbers, start_tracker


class Log:
    """Log of a run's metrics, sample keys and progress. Every process has one; only the main process writes files."""

    def __init__(
        self,
        config: LogConfig,
        run: Place,
        folder: Path,
        step: int,
        max_steps: int,
        accelerator: Accelerator,
        settings: dict[str, Any],
    ):
        """Continue the log after `step`, without the lines that an interrupted launch wrote for later steps.

        Args:
            run: the run's folder or URL, in which `evaluation watch` stores results.
            folder: the launch's own folder.
            settings: the run's config, for display in the tracker.
        """
        run_dir = folder.parents[1]
        self.config, self.run_dir, self.max_steps, self.accelerator = config, run_dir, max_steps, accelerator
        self.is_main = accelerator.is_main_process
        self.metrics = JsonLines(run_dir / "metrics.jsonl", step, folder) if self.is_main else None
        has_samples = self.is_main and config.samples
        self.samples = JsonLines(run_dir / "samples.jsonl", step, folder) if has_samples else None
        self.progress = Progress("train", "steps", max_steps, step) if self.is_main else None
        self.first_step, self.start = step, time.monotonic()
        self.last_fields: dict[str, Any] = {}
        """Fields of the last line of metrics.jsonl that this launch wrote."""
        self.evaluations: EvaluationQueue | None = None
        if config.tracker != "none":
            start_tracker(config, accelerator, settings, folder)
            if self.is_main and is_logged_by_trainer(config.tracker):
                self.evaluations = EvaluationQueue(run)

    def __enter__(self) -> "Log":
        if self.progress:
            self.progress.__enter__()
        if self.evaluations:
            self.evaluations.__enter__()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self.evaluations:
            self.evaluations.__exit__()
        if self.progress:
            self.progress.__exit__()
        if isinstance(error, Preempted):  # flush the tracker, because the next launch resumes the same tracker run
            self._end_in_tracker()

    def advance(self) -> None:
        """Count one more step on the progress bar, or print a line at intervals."""
        if self.progress:
            self.progress.advance(partial(self._figures, self.progress.completed + 1))

    def write_samples(self, batch: Batch, step: int) -> None:
        """Write the keys of a global batch to samples.jsonl, in global order. All processes must call it.

        Args:
            batch: this process's share of the global batch.
            step: number of the step that trains on it, counted from 1.
        """
        if not self.config.samples:
            return
        pairs = gather_object(list(zip(batch.slots.tolist(), batch.keys, strict=True)))
        if self.samples:
            self.samples.write(step=step, keys=[key for _, key in sorted(pairs)])

    def is_due(self, step: int) -> bool:
        """Return whether a line of metrics is due after `step` steps."""
        return step % self.config.every == 0 or step == self.max_steps

    def write_metrics(self, step: int, fields: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl, log it to the tracker, and update the progress bar if that is due.

        If the tracker fails, training continues.
        """
        self.last_fields = replace_non_finite(fields)
        if self.metrics:
            self.metrics.write(step=step, **fields)
        if self.progress and (self.progress.is_due or step == self.max_steps):
            self._show_progress(self.progress, step)
        with self._warning(
            f"{self.config.tracker} did not accept what was logged at step {step} (metrics.jsonl has all metrics, and "
            f"evaluations are logged again)"
        ):
            self.accelerator.log(flatten_numbers(self.last_fields), step=step)
            if self.evaluations:
                self.evaluations.log_next(self.accelerator.trackers, step)

    def _end_in_tracker(self) -> None:
        """Close the tracker, which flushes its data, and the process group. If the tracker fails, print a warning."""
        with self._warning(f"{self.config.tracker} may lack the run's last lines (metrics.jsonl has all of them)"):
            self.accelerator.end_training()
        self.accelerator.state.destroy_process_group()  # end_training does not after an error

    @contextmanager
    def _warning(self, text: str) -> Iterator[None]:
        """Print `text` as a warning, with the error, if the tracker fails."""
        try:
            yield
        except Exception as error:  # each tracker's client has its own exception classes
            print(f"warning: {text}: {type(error).__name__}: {error}", flush=True)

    def _show_progress(self, progress: Progress, step: int) -> None:
        figures = self._figures(step)
        text = "loss not finite" if figures["loss"] is None else "loss {loss:.4f}  {images_per_second:.1f} img/s"
        progress.show(step, text.format(**figures), figures)

    def _figures(self, step: int) -> dict[str, Any]:
        """Return the figures to show after `step` steps: those of the last line of metrics, if there is one."""
        last: dict[str, Any] = {
            name: self.last_fields[name] for name in ("loss", "images_per_second") if name in self.last_fields
        }
        seconds_per_step = (time.monotonic() - self.start) / (step - self.first_step)
        eta = round(seconds_per_step * (self.max_steps - step))
        return {"step": step, "steps": self.max_steps, **last, "eta_seconds": eta}

    def sync(self) -> dict[str, int]:
        """Flush the log to disk before a checkpoint is saved, because a resumed run does not write earlier lines again.

        Returns:
            Name of each log file in the run folder → its size in bytes.
        """
        files = {"metrics.jsonl": self.metrics, "samples.jsonl": self.samples}
        return {name: lines.sync() for name, lines in files.items() if lines is not None}

    def close(self) -> None:
        """End the run in the tracker and draw loss.png. All processes must call this once training is complete."""
        self._end_in_tracker()
        if self.is_main:
            plot_run(self.run_dir)
