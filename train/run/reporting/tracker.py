"""The run in its tracker: begun once, gone on with by each launch, and written to by nobody else."""

import json
import subprocess
import uuid
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from shards.base.config import flatten
from shards.base.durable import write_file
from train.run.launches import TRACKER_ID, publish
from train.run.reporting.config import LogConfig

STEP = "evaluation/step"
"""Of the checkpoint that `evaluation/…` is of. Trackers are told of it later, and wandb's own steps do not go back."""


def start_tracker(config: LogConfig, accelerator: Accelerator, settings: dict[str, Any], folder: Path) -> None:
    """Begin the tracker's run, or go on with it.

    Args:
        settings: the run's config.
        folder: the launch's own.
    """
    run_dir, main = folder.parents[1], accelerator.is_main_process
    name, settings = config.name or run_dir.name, flatten(settings) | {"source": source_state()}
    known = tracker_ids(folder) if main else {}
    options: dict[str, dict[str, Any]] = {
        "wandb": {"name": name, "id": known.get("id"), "resume": "allow", "tags": config.tags, "dir": str(run_dir)},
        "mlflow": {
            "run_name": name,
            "run_id": known.get("mlflow"),
            "tags": dict.fromkeys(config.tags, "true"),
        },
    }
    if config.tracker == "tensorboard":  # a folder of the run folder, which `evaluation` writes to as well
        accelerator.init_trackers("tracker")
        if main:
            writer = accelerator.get_tracker("tensorboard", unwrap=True)
            writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in settings.items()))
        return
    own = {name: value for name, value in options.items() if name == config.tracker}
    again = "mlflow" in own and "mlflow" in known  # whose settings may not change
    accelerator.init_trackers(config.project, config=None if again else settings, init_kwargs=own)
    if main and "mlflow" in own and not again:
        tracker_ids(folder, mlflow=accelerator.get_tracker("mlflow", unwrap=True).info.run_id)
    if main and "wandb" in own:
        accelerator.get_tracker("wandb", unwrap=True).define_metric("evaluation/*", step_metric=STEP)


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
    """Return the product's commit, with `-dirty` if tracked files differ from it.

    None if git does not track this file. An installed package, for instance, may be in a virtual environment inside
    the user's own repository, whose commit says nothing about this code.
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


def flat_numbers(fields: dict[str, Any]) -> dict[str, float]:
    """The numbers of a log line as trackers take them: `a/b` for what is b in a."""
    return {name: value for name, value in flatten(fields, "/").items() if isinstance(value, int | float)}
