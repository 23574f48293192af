"""What a run says while it trains: metrics.jsonl, samples.jsonl, the tracker and the progress bar."""

import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from shards.base.errors import Preempted
from shards.base.progress import Progress
from shards.base.store import Place
from train.data.batch import Batch
from train.run.reporting.config import LogConfig
from train.run.reporting.evaluations import TOLD_BY_WATCHERS, Evaluations
from train.run.reporting.json_lines import JsonLines, finite
from train.run.reporting.plot import plot_run
from train.run.reporting.tracker import flat_numbers, start_tracker


class Log:
    """Every process has one; the main one writes."""

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
        """Goes on after `step`; what an interrupted run wrote of later steps is dropped.

        Args:
            run: the run folder or its address, as others know it.
            folder: the launch's own.
            settings: of the run, for the tracker.
        """
        run_dir = folder.parents[1]
        self.config, self.run_dir, self.max_steps, self.accelerator = config, run_dir, max_steps, accelerator
        self.main = accelerator.is_main_process
        self.metrics = JsonLines(run_dir / "metrics.jsonl", step, folder) if self.main else None
        self.sample_lines = JsonLines(run_dir / "samples.jsonl", step, folder) if self.main and config.samples else None
        self.progress = Progress("train", "steps", max_steps, step) if self.main else None
        self.first_step, self.start = step, time.monotonic()
        self.newest: dict[str, Any] = {}
        """Fields of the last line."""
        self.evaluations: Evaluations | None = None
        if config.tracker != "none":
            start_tracker(config, accelerator, settings, folder)
            if self.main and config.tracker not in TOLD_BY_WATCHERS:
                self.evaluations = Evaluations(run)

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
        if isinstance(error, Preempted):  # the next launch goes on with the tracker's run
            self.accelerator.end_training()

    def advance(self) -> None:
        """One more step is done."""
        if self.progress:
            self.progress.advance()

    def samples(self, batch: Batch, step: int) -> None:
        """Write the keys of the global batch of step number `step`, in global order."""
        if not self.config.samples:
            return
        pairs = gather_object(list(zip(batch.slots.tolist(), batch.keys, strict=True)))
        if self.sample_lines:
            self.sample_lines.write(step=step, keys=[key for _, key in sorted(pairs)])

    def is_due(self, step: int) -> bool:
        """Whether a line is written after `step` steps."""
        return step % self.config.every == 0 or step == self.max_steps

    def write(self, step: int, fields: dict[str, Any]) -> None:
        """A line of metrics.jsonl, and the same to the tracker; now and then, how far the run is."""
        self.newest = finite(fields)
        if self.metrics:
            self.metrics.write(step=step, **fields)
        if self.progress and (self.progress.is_due or step == self.max_steps):
            seconds = (time.monotonic() - self.start) / (step - self.first_step) * (self.max_steps - step)
            shown = {name: fields[name] for name in ("loss", "images_per_second")}
            text = "loss {loss:.4f}  {images_per_second:.1f} img/s" if fields["loss"] is not None else "loss not finite"
            figures = {"step": step, "steps": self.max_steps, **finite(shown), "eta_seconds": round(seconds)}
            self.progress.show(step, text.format(**shown), figures)
        self.accelerator.log(flat_numbers(self.newest), step=step)
        if self.evaluations:
            self.evaluations.tell_next(self.accelerator.trackers, step)

    def keep(self) -> dict[str, int]:
        """Have what was written survive a power cut: a checkpoint goes on from its step, and writes no line again.

        Returns:
            File of the run folder → its bytes.
        """
        files = {"metrics.jsonl": self.metrics, "samples.jsonl": self.sample_lines}
        return {name: lines.keep() for name, lines in files.items() if lines is not None}

    def close(self) -> None:
        """Finish the tracker and draw loss.png."""
        self.accelerator.end_training()
        if self.main:
            plot_run(self.run_dir)
