"""The run's counterpart in its tracker, which the first launch starts and later launches resume."""

import json
import subprocess
import uuid
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from shards.base.config import flatten
from shards.base.durable import write_file
from shards.base.errors import Outage, is_storage_error
from train.run.checkpoints.checkpoint import TRACKER_ID
from train.run.lease.folder import publish
from train.run.reporting.config import LogConfig

EVALUATION_STEP = "evaluation/step"
"""Name under which an evaluation's checkpoint step is logged. In wandb, it is the x-axis of `evaluation/…`, because
wandb's own step has advanced by the time an evaluation is logged."""


def start_tracker(config: LogConfig, accelerator: Accelerator, settings: dict[str, Any], folder: Path) -> None:
    """Start the run in its tracker, or resume it.

    Args:
        settings: the run's config, for display in the tracker.
        folder: the launch's own folder.

    Raises:
        Outage: the tracker's client failed to start, for example without credentials or a connection.
    """
    run_dir, is_main = folder.parents[1], accelerator.is_main_process
    name, settings = config.name or run_dir.name, flatten(settings) | {"source": source_version()}
    ids = load_tracker_ids(folder) if is_main else {}
    if config.tracker == "tensorboard":  # its log folder is RUN/tracker, which `evaluation watch` writes to as well
        accelerator.init_trackers("tracker")
        if is_main:
            writer = accelerator.get_tracker("tensorboard", unwrap=True)
            writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in settings.items()))
        return
    init_kwargs: dict[str, dict[str, Any]] = {
        "wandb": {"name": name, "id": ids.get("id"), "resume": "allow", "tags": config.tags, "dir": str(run_dir)},
        "mlflow": {"run_name": name, "run_id": ids.get("mlflow"), "tags": dict.fromkeys(config.tags, "true")},
    }
    resumes_mlflow = config.tracker == "mlflow" and "mlflow" in ids  # mlflow does not allow settings to change
    try:
        accelerator.init_trackers(config.project, config=None if resumes_mlflow else settings, init_kwargs=init_kwargs)
    except Exception as error:  # each tracker's client has its own exception classes
        if is_storage_error(error):
            raise
        reason = str(error).rstrip(".")
        raise Outage(
            f"log.tracker: {config.tracker} could not be started: {type(error).__name__}: {reason}. Fix the cause (for "
            f"example, log in to it, or restore the connection) and run the same command again, or set log.tracker to "
            f"tensorboard or none."
        ) from error
    if is_main and config.tracker == "mlflow" and not resumes_mlflow:
        run_id = accelerator.get_tracker("mlflow", unwrap=True).info.run_id
        save_tracker_ids(ids | {"mlflow": run_id}, folder)
    if is_main and config.tracker == "wandb":
        accelerator.get_tracker("wandb", unwrap=True).define_metric("evaluation/*", step_metric=EVALUATION_STEP)


def load_tracker_ids(folder: Path) -> dict[str, str]:
    """Load the run's IDs in trackers from tracker.json, which the first launch creates.

    Args:
        folder: the launch's own folder.

    Returns:
        `id`, chosen by the first launch, and `mlflow` if the run exists in MLflow, which chooses its IDs itself.
    """
    path = folder.parents[1] / TRACKER_ID
    if path.is_file():
        ids: dict[str, str] = json.loads(path.read_bytes())
        return ids
    ids = {"id": uuid.uuid4().hex[:12]}
    save_tracker_ids(ids, folder)
    return ids


def save_tracker_ids(ids: dict[str, str], folder: Path) -> None:
    """Write tracker.json into the run folder, atomically. `folder`: the launch's own folder."""
    path = folder.parents[1] / TRACKER_ID
    publish(write_file(folder / path.name, json.dumps(ids).encode()), path, folder)


def source_version() -> str | None:
    """Return the commit of this package's source code, with `-dirty` if tracked files differ from it.

    Return None if git does not track this file. An installed package, for instance, may be in a virtual environment
    inside the user's own repository, whose commit says nothing about this code.
    """
    file = Path(__file__)

    def git(*words: str) -> str:
        command = ["git", "-C", str(file.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "--", file.name)
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def flatten_numbers(fields: dict[str, Any]) -> dict[str, float]:
    """Return the numeric fields of a log line, with nested names joined as `a/b`."""
    return {name: value for name, value in flatten(fields, "/").items() if isinstance(value, int | float)}
