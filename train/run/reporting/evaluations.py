"""Logging of checkpoint evaluations to the run's tracker.

Only one process may write to a run in a tracker, because wandb loses rows if two do (wandb issues 10349 and 12269).
Therefore, `evaluation watch` stores each checkpoint's results in a file in the run, and the trainer logs one results
file with each line of metrics.jsonl. `python -m train tell RUN` logs files that are created after training has ended.

    RUN/tracker/evaluations/0000001000.3f2a9c1d.zip          results file: values.json, with the step, and PNG images
    RUN/tracker/evaluations/0000001000.3f2a9c1d.told.json    marker: these results have been logged
"""

import json
import tempfile
import threading
from collections import deque
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

from shards.base.errors import Outage
from shards.base.store import Place, Store
from shards.open import open_store
from train.run.reporting.tracker import EVALUATION_STEP

FOLDER = "tracker/evaluations"
RESULTS_SUFFIX, MARKER_SUFFIX = ".zip", ".told.json"
POLL_SECONDS = 30.0
"""Interval between checks for new results files, in seconds."""


class EvaluationResults(NamedTuple):
    """Evaluation results of one checkpoint, as read from a results file."""

    name: str
    """Name of the file in FOLDER, without its suffix."""
    step: int
    """Step of the checkpoint."""
    values: dict[str, float]
    """Value for each curve, by name."""
    pictures: dict[str, bytes]
    """PNG files by name, as encoded by `evaluation watch`. The trainer does not decode images."""


def is_logged_by_trainer(tracker: str) -> bool:
    """Return whether the trainer logs evaluations to this tracker.

    TensorBoard allows several writers, so `evaluation watch` writes its event files itself.
    """
    return tracker not in ("none", "tensorboard")


def list_unlogged(store: Store) -> list[str]:
    """Return the names of a run's results files that have not been logged to its tracker, ordered by step."""
    files = store.files(FOLDER)
    logged = {name.removesuffix(MARKER_SUFFIX) for name in files if name.endswith(MARKER_SUFFIX)}
    found = [name.removesuffix(RESULTS_SUFFIX) for name in files if name.endswith(RESULTS_SUFFIX)]
    return [name for name in found if name not in logged]


def read_results(store: Store, name: str) -> EvaluationResults | None:
    """Read a results file. If it is damaged, report it and return None.

    Raises:
        OSError, Outage: the file cannot be read at the moment. Damaged content does not raise these errors.
    """
    path = f"{FOLDER}/{name}{RESULTS_SUFFIX}"
    where, content = store.where(path), store.read(path)
    try:
        with ZipFile(BytesIO(content)) as archive:  # reading a member verifies its checksum
            fields = json.loads(archive.read("values.json"))
            images = [member for member in archive.namelist() if member.endswith(".png")]
            pictures = {member.removesuffix(".png"): archive.read(member) for member in images}
        values = {metric: float(value) for metric, value in fields["values"].items()}
        return EvaluationResults(name, int(fields["step"]), values, pictures)
    except Exception as error:  # the file could be read, so any parser error means that its content is damaged
        print(f"The results file {where} is damaged and will not be logged: {error!r}", flush=True)
        return None


def log_results(trackers: list[Any], results: EvaluationResults, wandb_step: int) -> None:
    """Log the results of a checkpoint to accelerate's trackers.

    An image that a tracker rejects is reported and skipped, so that it does not affect training or other results.

    Args:
        wandb_step: current step of the run in wandb. It may only increase, so the checkpoint's step cannot be used.
    """
    for tracker in trackers:
        step = wandb_step if tracker.name == "wandb" else results.step
        tracker.log({EVALUATION_STEP: results.step, **results.values}, step=step)
        for name, png in results.pictures.items():
            try:
                log_picture(tracker, name, png, step)
            except Exception as error:  # each tracker's client raises its own exceptions
                print(
                    f"The image {name} for step {results.step} was not logged, because the tracker {tracker.name} "
                    f"rejected it: {error!r}",
                    flush=True,
                )


def log_picture(tracker: Any, name: str, png: bytes, step: int) -> None:
    """Log a PNG file, if the tracker's client accepts files and copies them before its call returns."""
    if tracker.name not in ("wandb", "swanlab", "aim", "mlflow"):
        return
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        path = Path(folder) / f"{step:010d}.png"
        path.write_bytes(png)
        if tracker.name == "mlflow":
            tracker.log_artifact(str(path), name)
        else:  # accelerate passes the value itself to Aim, and to other trackers each item of a list
            tracker.log_images({name: str(path) if tracker.name == "aim" else [str(path)]}, step=step)


def mark_logged(store: Store, name: str) -> None:
    """Record that the results named `name` have been logged."""
    store.create(f"{FOLDER}/{name}{MARKER_SUFFIX}", b"{}")


class EvaluationQueue:
    """Queue of evaluations to log during training. While the context is open, a thread looks for new results files.

    Only that thread accesses storage, so slow storage does not delay training.
    """

    def __init__(self, run: Place):
        self.store = open_store(run)
        self.seen: set[str] = set()
        """Names of the files that have been read."""
        self.pending: deque[EvaluationResults] = deque()
        """Results that have not been logged yet."""
        self.logged: deque[str] = deque()
        """Names of logged results whose marker has not been written yet."""
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._poll, name="evaluations", daemon=True)

    def __enter__(self) -> "EvaluationQueue":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.thread.join()

    def log_next(self, trackers: list[Any], step: int) -> None:
        """Log the oldest pending results, if there are any. Results that fail are tried again after the others.

        Call it at most once per step, because wandb merges everything that is logged at a step into one row. While a
        resumed run repeats steps that a killed launch had logged, results wait, because wandb ignores these steps.
        """
        is_ignored = any(each.name == "wandb" and step < each.tracker.starting_step for each in trackers)
        if self.pending and not is_ignored:
            results = self.pending.popleft()
            try:
                log_results(trackers, results, step)
            except Exception:
                self.pending.append(results)
                raise
            self.logged.append(results.name)

    def _poll(self) -> None:
        while True:
            is_last = self.closing.is_set()  # read before the markers are written, so that no marker is missed
            try:
                self._write_markers()
                if not is_last:
                    self._read_new()
            except (OSError, Outage) as error:  # retried at the next check, or by the next launch
                print(
                    f"Evaluations of {self.store.where()} could not be logged yet and will be retried: {error}",
                    flush=True,
                )
            if is_last:
                return
            self.closing.wait(POLL_SECONDS)

    def _write_markers(self) -> None:
        while self.logged:
            mark_logged(self.store, self.logged[0])
            self.logged.popleft()

    def _read_new(self) -> None:
        """Read new results files. A file that cannot be read is retried later, without delaying the others."""
        failure: OSError | Outage | None = None
        for name in list_unlogged(self.store):
            if name not in self.seen:
                try:
                    results = read_results(self.store, name)
                except (OSError, Outage) as error:
                    failure = error
                    continue
                self.seen.add(name)
                if results is not None:
                    self.pending.append(results)
        if failure is not None:
            raise failure
