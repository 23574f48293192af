"""What a run says while it trains: metrics.jsonl, samples.jsonl, the tracker and the progress bar."""

import json
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from pydantic import Field

from shards.base.config import Config, flatten
from shards.base.durable import write_file
from shards.base.errors import Preempted
from shards.base.progress import Progress
from train.data.batch import Batch
from train.run.launches import TRACKER_ID, publish
from train.run.metrics import JsonLines, finite
from train.run.plot import plot_run


class LogConfig(Config):
    """What the run says of itself."""

    every: int = Field(50, ge=1)
    """Steps between lines of metrics.jsonl."""
    samples: bool = False
    """Write samples.jsonl: the keys of each global batch, in global order."""
    tracker: str = "tensorboard"
    """none, or one that accelerate knows: tensorboard, wandb, mlflow, comet_ml, aim, clearml, dvclive, …"""
    project: str = "latentmill"
    """The tracker's project, or experiment; tensorboard has none."""
    name: str | None = None
    """The run's name in the tracker; null: the run folder's."""
    tags: tuple[str, ...] = ()
    """Of the run in the tracker."""
    keep_output: int = Field(20, ge=0)
    """Launches of which it is kept what each process printed, in RUN/logs; 0: none."""
    metrics_at: str | None = Field(None, pattern=r"^[^\s:]+:\d+$")
    """HOST:PORT at which the main process serves figures to Prometheus (0.0.0.0:9400); null: nowhere. Whoever reaches
    it may read them."""
    peak_tflops: float | None = Field(None, gt=0)
    """What one device does at most, in TFLOP/s, for `mfu`; null: bfloat16's by the device's name, where it is known."""


class Log:
    """Every process has one; the main one writes."""

    def __init__(
        self,
        config: LogConfig,
        folder: Path,
        step: int,
        max_steps: int,
        accelerator: Accelerator,
        settings: dict[str, Any],
    ):
        """Goes on after `step`; what an interrupted run wrote of later steps is dropped.

        Args:
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
        if config.tracker != "none":
            self._start_tracker(settings, folder)

    def __enter__(self) -> "Log":
        if self.progress:
            self.progress.__enter__()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self.progress:
            self.progress.__exit__()
        if isinstance(error, Preempted):  # the next launch goes on with the tracker's run
            self.accelerator.end_training()

    def _start_tracker(self, settings: dict[str, Any], folder: Path) -> None:
        name, settings = self.config.name or self.run_dir.name, flatten(settings) | {"source": source_state()}
        known = tracker_ids(folder) if self.main else {}
        options: dict[str, dict[str, Any]] = {
            "wandb": {
                "name": name,
                "id": known.get("id"),
                "resume": "allow",
                "tags": self.config.tags,
                "dir": str(self.run_dir),
            },
            "mlflow": {
                "run_name": name,
                "run_id": known.get("mlflow"),
                "tags": dict.fromkeys(self.config.tags, "true"),
            },
        }
        if self.config.tracker == "tensorboard":  # a folder of the run folder, which `evaluate` writes to as well
            self.accelerator.init_trackers("tracker")
            if self.main:
                writer = self.accelerator.get_tracker("tensorboard", unwrap=True)
                writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in settings.items()))
            return
        own = {name: value for name, value in options.items() if name == self.config.tracker}
        again = "mlflow" in own and "mlflow" in known  # whose settings may not change
        self.accelerator.init_trackers(self.config.project, config=None if again else settings, init_kwargs=own)
        if self.main and "mlflow" in own and not again:
            tracker_ids(folder, mlflow=self.accelerator.get_tracker("mlflow", unwrap=True).info.run_id)

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


def tracker_ids(folder: Path, **more: str) -> dict[str, str]:
    """What a run is called in its tracker, by its first launch: `id`, and in mlflow, which makes its own, `mlflow`.

    Args:
        folder: the launch's own; the ids are kept in the run folder.
        more: to be kept, too.
    """
    path = folder.parents[1] / TRACKER_ID
    known = json.loads(path.read_bytes()) if path.is_file() else {}
    found: dict[str, str] = {"id": uuid.uuid4().hex[:12]} | known | more
    if found != known:
        publish(write_file(folder / path.name, json.dumps(found).encode()), path, folder)
    return found


def source_state() -> str | None:
    """The product's commit, with `-dirty` where files differ from it; None: it was not run from a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def flat_numbers(fields: dict[str, Any]) -> dict[str, float]:
    """The numbers of a log line as trackers take them: `a/b` for what is b in a."""
    return {name: value for name, value in flatten(fields, "/").items() if isinstance(value, int | float)}
