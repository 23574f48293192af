"""The end of a run: recognise that it has been reached, and say where the result is and what comes next.

Nothing here imports torch, so that a command that has nothing to do ends at once.
"""

import shlex
from pathlib import Path

import yaml

from shards.base.durable import DamagedFile
from shards.base.store import Place, parse_place
from shards.open import open_store
from train.config import TrainConfig
from train.run.saving.checkpoint import list_checkpoints, step_folder, step_of, verify_checkpoint
from train.run.saving.local_copy import parse_folder, remote_folder, stored_checkpoints

NOT_COMPARED = ("num_processes", "sharding")
"""Fields that may differ between the launches of a run, and that a launcher may set."""


def describe_if_finished(config: TrainConfig, config_file: Path | None) -> str | None:
    """Say that the run has done all its steps under this very config; None: it has not, or that takes a closer look.

    Where several processes train, only one process may ask, before the others start.
    """
    found = open_store(config.run_dir).read_many(["config.yaml"])
    if not found or not _same(config, found["config.yaml"]):
        return None
    newest = _newest_at_address(config.run_dir) if isinstance(config.run_dir, str) else _newest(config.run_dir)
    if newest is None:
        return None
    step, launch = newest
    if step < config.max_steps:
        return None
    return f"{nothing_to_do(config)}\n{describe_finished(config, step, launch, config_file)}"


def nothing_to_do(config: TrainConfig) -> str:
    """The message for a run that has done all its steps."""
    return f"{config.run_dir} has done its {config.max_steps} steps; there is nothing to do."


def describe_finished(config: TrainConfig, step: int, launch: int | None, config_file: Path | None) -> str:
    """The message at the end of a run: its last step, its last checkpoint, and the commands that may follow.

    Args:
        launch: number of the launch that uploaded the checkpoint, of a run at an address.
    """
    if isinstance(config.run_dir, Path):
        checkpoint = str(step_folder(config.run_dir, step))
    else:
        name = step_folder(Path(), step).name
        checkpoint = f"{config.run_dir}/{remote_folder(name, launch) if launch else f'checkpoints/{name}'}"
    commands = "\n".join(f"  {command}" for command in next_commands(config, config_file))
    return f"Finished at step {step}. Checkpoint: {checkpoint}\nNext:\n{commands}"


def next_commands(config: TrainConfig, config_file: Path | None) -> list[str]:
    """Commands that take the finished run further: evaluation, export, and phases that start from it."""
    run = shlex.quote(str(config.run_dir))
    # an export is a folder, also where the run is at an address
    output = "" if isinstance(config.run_dir, Path) else f" --output runs/{Path(config.run_dir).name}/export"
    return [
        f"python -m evaluation score --config configs/evaluate.yaml --model {run}",
        f"python -m train export {run}{output}",
        *(f"python -m train --config {shlex.quote(str(path))}" for path in following_phases(config, config_file)),
    ]


def following_phases(config: TrainConfig, config_file: Path | None) -> list[Path]:
    """Config files beside the run's own whose `init_from` names the run."""
    if config_file is None:
        return []
    return [path for path in sorted(config_file.parent.glob("*.yaml")) if _init_from(path) == config.run_dir]


def _init_from(path: Path) -> Place | None:
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):  # any file may be there; this one is no config of ours
        return None
    named = values.get("init_from") if isinstance(values, dict) else None
    return parse_place(named) if isinstance(named, str) else None


def _same(config: TrainConfig, data: bytes) -> bool:
    """Return whether a run's config.yaml holds this config."""
    try:
        saved = yaml.safe_load(data)
    except yaml.YAMLError:  # edited by hand, perhaps: the run writes it anew
        return False
    asked = config.model_dump(mode="json")
    ignored = [*NOT_COMPARED, *(["precision"] if config.precision == "auto" else [])]  # which it holds resolved
    return isinstance(saved, dict) and all(
        saved.get(name) == value for name, value in asked.items() if name not in ignored
    )


def _newest(run_dir: Path) -> tuple[int, None] | None:
    """The step of a run folder's newest checkpoint, if every byte of it is as written."""
    folders = list_checkpoints(run_dir)
    try:
        return (step_of(verify_checkpoint(folders[-1]).folder), None) if folders else None
    except DamagedFile:  # an earlier one may be sound: that is for the training command to find out, and to say
        return None


def _newest_at_address(address: str) -> tuple[int, int] | None:
    """The step of the newest checkpoint at an address, whose state.json is sound, and the launch that uploaded it."""
    stored = stored_checkpoints(open_store(address))
    if not stored:
        return None
    name = max(stored, key=lambda name: step_of(Path(name)))
    parsed = parse_folder(Path(stored[name].folder).name)
    return step_of(Path(name)), parsed[1] if parsed else 0
