"""Checks without torch, so that most invalid requests, and commands for finished runs, end within a second.

`prepare` repeats these checks. This module also builds the final message of a run.
"""

import argparse
import shlex
from pathlib import Path

import yaml

from shards.base.config import load_config
from shards.base.durable import DamagedFile
from shards.base.errors import RequestError
from shards.base.store import Place
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from train.config import TrainConfig
from train.run.checkpoints.checkpoint import (
    list_checkpoints,
    refuse_names_of_urls,
    step_folder,
    step_of,
    verify_checkpoint,
)
from train.run.checkpoints.local_copy import launch_folder, parse_folder, stored_checkpoints
from train.run.preflight import check_run_dir

LAUNCHER_FIELDS = ("num_processes", "sharding", "sharding_group")
"""Config fields that depend on the launched processes, so they may differ between the launches of a run."""


def check_without_torch(config: TrainConfig, file: Path | None) -> str | None:
    """Return the final message if the run has already finished; otherwise check that its inputs exist.

    If several processes train, only one may call this, before the others start.

    Args:
        file: the config file.

    Raises:
        RequestError: the run folder is not writable, or the run has not finished and an input is missing.
    """
    check_run_dir(config.work)
    finished = describe_if_finished(config, file)
    if finished is None:
        check_inputs_exist(config)
    return finished


def config_file(arguments: list[str]) -> Path | None:
    """Return the value of `--config`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    path: Path | None = parser.parse_known_args(arguments)[0].config
    return path


def check_inputs_exist(config: TrainConfig) -> None:
    """Check that the latents roots exist and, if a new run starts from a local run, that it has a checkpoint.

    Raises:
        RequestError: a root is missing, the run to start from has no checkpoint, or a run's checkpoints have the names
            used at URLs.
    """
    if isinstance(config.run_dir, Path):
        refuse_names_of_urls(config.run_dir)
        if isinstance(config.init_from, Path) and not list_checkpoints(config.run_dir):
            refuse_names_of_urls(config.init_from)
            if not list_checkpoints(config.init_from):
                raise no_checkpoint(config.init_from)
    validation = [] if config.validation.root is None else [config.validation.root]
    for place in dict.fromkeys([*(stream.root for stream in config.data.streams), *validation]):
        EncodingRecord.load(open_store(place))


def no_checkpoint(run_dir: Place) -> RequestError:
    """Build the error for an `init_from` that has no complete checkpoint."""
    return RequestError(
        f"init_from is {run_dir}, which has no complete checkpoint. Train that run first (for phase 1: `make train "
        f"PHASE=1`), or set init_from to a run that has a checkpoint."
    )


def describe_if_finished(config: TrainConfig, config_file: Path | None) -> str | None:
    """Return the final message if the run has completed all its steps with this exact config.

    Return None if the run is unfinished, or if only `prepare` can decide. If several processes train, only one may call
    this, before the others start.
    """
    files = open_store(config.run_dir).read_many(["config.yaml"])
    if not files or not _is_unchanged(config, files["config.yaml"]):
        return None
    place, last = config.run_dir, config.max_steps
    newest = _newest_at_url(place) if isinstance(place, str) else _newest_in_folder(place, last)
    if newest is None or newest[0] < last:
        return None
    step, launch = newest
    return f"{nothing_to_do(config)}\n{describe_finished(config, step, launch, config_file)}"


def nothing_to_do(config: TrainConfig) -> str:
    """Return the message for a run that has already completed all its steps."""
    return f"{config.run_dir} has already reached max_steps ({config.max_steps}), so there is nothing to do."


def describe_finished(config: TrainConfig, step: int, launch: int | None, config_file: Path | None) -> str:
    """Return the message for the end of a run: its last step, its last checkpoint, and commands to run next.

    Args:
        launch: number of the launch that uploaded the checkpoint, if the run is at an object-store URL.
    """
    if isinstance(config.run_dir, Path):
        checkpoint = str(step_folder(config.run_dir, step))
    else:
        name = f"{config.run_dir}/checkpoints/{step_folder(Path(), step).name}"
        checkpoint = launch_folder(name, launch) if launch else name
    commands = "\n".join(f"  {command}" for command in next_commands(config, config_file))
    return f"Finished at step {step}. Checkpoint: {checkpoint}\nNext:\n{commands}"


def next_commands(config: TrainConfig, config_file: Path | None) -> list[str]:
    """Return the commands to evaluate and export the finished run, and to train the phases that start from it."""
    run = shlex.quote(str(config.run_dir))
    # an export is always a local folder
    output = ""
    if isinstance(config.run_dir, str):
        output = f" --output {shlex.quote(f'runs/{Path(config.run_dir).name}/export')}"
    return [
        f"python -m evaluation sample --config configs/evaluate.yaml --model {run} --prompts.file prompts.txt",
        f"python -m train export {run}{output}",
        *(f"python -m train --config {shlex.quote(str(path))}" for path in following_phases(config, config_file)),
    ]


def following_phases(config: TrainConfig, config_file: Path | None) -> list[Path]:
    """Return the config files in the folder of `config_file` whose `init_from` is this run."""
    if config_file is None:
        return []
    return [path for path in sorted(config_file.parent.glob("*.yaml")) if _init_from(path) == config.run_dir]


def _init_from(path: Path) -> Place | None:
    try:
        return load_config(TrainConfig, path, [], "train").init_from
    except RequestError:  # the folder also contains other files, such as precompute.yaml
        return None


def _is_unchanged(config: TrainConfig, data: bytes) -> bool:
    """Return whether the content of a run's config.yaml equals `config`, apart from LAUNCHER_FIELDS."""
    try:
        saved = yaml.safe_load(data)
    except yaml.YAMLError:  # perhaps edited by hand; the next launch rewrites it
        return False
    current = config.model_dump(mode="json")
    # the run saved the precision that `auto` resolved to
    ignored = [*LAUNCHER_FIELDS, *(["precision"] if config.precision == "auto" else [])]
    return isinstance(saved, dict) and all(
        saved.get(name) == value for name, value in current.items() if name not in ignored
    )


def _newest_in_folder(run_dir: Path, last: int) -> tuple[int, None] | None:
    """Return the step of the newest checkpoint in a run folder, or None if it is damaged or from a step before
    `last`."""
    folders = [folder for folder in list_checkpoints(run_dir) if step_of(folder) >= last]
    try:
        return (step_of(verify_checkpoint(folders[-1]).folder), None) if folders else None
    except DamagedFile:  # training then looks for an intact earlier checkpoint, and reports the damaged one
        return None


def _newest_at_url(url: str) -> tuple[int, int] | None:
    """Return the step and the launch number of the newest checkpoint at a URL whose state.json is intact, or None."""
    stored = stored_checkpoints(open_store(url))
    if not stored:
        return None
    name = max(stored, key=lambda name: step_of(Path(name)))
    parsed = parse_folder(Path(stored[name].folder).name)
    return step_of(Path(name)), parsed[1] if parsed else 0
