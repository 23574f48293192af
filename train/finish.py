"""The end of a run: recognising that it has been reached, and the final message.

This module must not import torch, so that a command without work to do ends within a second.
"""

import shlex
from pathlib import Path

import yaml

from shards.base.durable import DamagedFile
from shards.base.store import Place, parse_place
from shards.open import open_store
from train.config import TrainConfig
from train.run.checkpoints.checkpoint import list_checkpoints, step_folder, step_of, verify_checkpoint
from train.run.checkpoints.local_copy import parse_folder, remote_folder, stored_checkpoints

NOT_COMPARED = ("num_processes", "sharding")
"""Fields that a launcher may set, so they may differ between the launches of a run."""


def describe_if_finished(config: TrainConfig, config_file: Path | None) -> str | None:
    """Return the final message if the run has done all its steps under this exact config.

    None means that it has not, or that only `prepare` can tell. If several processes train, only one may call this,
    before the others start.
    """
    found = open_store(config.run_dir).read_many(["config.yaml"])
    if not found or not _same(config, found["config.yaml"]):
        return None
    newest = _newest_at_url(config.run_dir) if isinstance(config.run_dir, str) else _newest(config.run_dir)
    if newest is None:
        return None
    step, launch = newest
    if step < config.max_steps:
        return None
    return f"{nothing_to_do(config)}\n{describe_finished(config, step, launch, config_file)}"


def nothing_to_do(config: TrainConfig) -> str:
    """Return the message for a run that has already done all its steps."""
    return f"{config.run_dir} has done its {config.max_steps} steps; there is nothing to do."


def describe_finished(config: TrainConfig, step: int, launch: int | None, config_file: Path | None) -> str:
    """Return the message at the end of a run: last step, last checkpoint, and the commands that may come next.

    Args:
        launch: number of the launch that uploaded the checkpoint, if the run is at an object-store URL.
    """
    if isinstance(config.run_dir, Path):
        checkpoint = str(step_folder(config.run_dir, step))
    else:
        name = step_folder(Path(), step).name
        checkpoint = f"{config.run_dir}/{remote_folder(name, launch) if launch else f'checkpoints/{name}'}"
    commands = "\n".join(f"  {command}" for command in next_commands(config, config_file))
    return f"Finished at step {step}. Checkpoint: {checkpoint}\nNext:\n{commands}"


def next_commands(config: TrainConfig, config_file: Path | None) -> list[str]:
    """Return commands that use the finished run: evaluation, export, and the phases that start from it."""
    run = shlex.quote(str(config.run_dir))
    # an export is always a local folder
    output = "" if isinstance(config.run_dir, Path) else f" --output runs/{Path(config.run_dir).name}/export"
    return [
        f"python -m evaluation score --config configs/evaluate.yaml --model {run}",
        f"python -m train export {run}{output}",
        *(f"python -m train --config {shlex.quote(str(path))}" for path in following_phases(config, config_file)),
    ]


def following_phases(config: TrainConfig, config_file: Path | None) -> list[Path]:
    """Return List the config files beside the run's own that start from this run (`init_from`)."""
    if config_file is None:
        return []
    return [path for path in sorted(config_file.parent.glob("*.yaml")) if _init_from(path) == config.run_dir]


def _init_from(path: Path) -> Place | None:
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):  # not a config; the folder may contain any file
        return None
    named = values.get("init_from") if isinstance(values, dict) else None
    return parse_place(named) if isinstance(named, str) else None


def _same(config: TrainConfig, data: bytes) -> bool:
    """Return whether a run's config.yaml holds this config."""
    try:
        saved = yaml.safe_load(data)
    except yaml.YAMLError:  # perhaps edited by hand; the next launch rewrites it
        return False
    asked = config.model_dump(mode="json")
    ignored = [*NOT_COMPARED, *(["precision"] if config.precision == "auto" else [])]  # a run saves the resolved one
    return isinstance(saved, dict) and all(
        saved.get(name) == value for name, value in asked.items() if name not in ignored
    )


def _newest(run_dir: Path) -> tuple[int, None] | None:
    """Return the step of the newest checkpoint in a run folder, if all of its hashes match."""
    folders = list_checkpoints(run_dir)
    try:
        return (step_of(verify_checkpoint(folders[-1]).folder), None) if folders else None
    except DamagedFile:  # an earlier one may be intact; the training command checks that and reports it
        return None


def _newest_at_url(url: str) -> tuple[int, int] | None:
    """Return the step of the newest checkpoint at a URL with an intact state.json, and the launch that uploaded it."""
    stored = stored_checkpoints(open_store(url))
    if not stored:
        return None
    name = max(stored, key=lambda name: step_of(Path(name)))
    parsed = parse_folder(Path(stored[name].folder).name)
    return step_of(Path(name)), parsed[1] if parsed else 0
