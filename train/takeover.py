"""How a launch acquires the run that `prepare` looked at, and updates this machine's copy of it."""

import shutil
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator

from shards.base.durable import locked
from shards.base.errors import WorkError
from shards.open import open_store
from train.config import TrainConfig
from train.prepare import Prepared
from train.run.checkpoints import local_copy, remote
from train.run.checkpoints.checkpoint import checkpoints_seen, step_folder
from train.run.launches import Launch, now, take


def take_run(config: TrainConfig, prepared: Prepared) -> Path:
    """Acquire the run folder for this launch, and return the launch's own folder in it.

    Raises:
        RequestError: another launch holds the run.
        WorkError: the previous launch woke up and saved while this one was preparing.
    """
    held = prepared.held
    folder = take(config.work, config.takeover_after, held.sign)
    if checkpoints_seen(config.work) != held.seen:
        raise WorkError(
            f"The checkpoints of {config.run_dir} changed while this launch was starting: the previous launch was "
            f"still running. It has been fenced off and can no longer write. The same command resumes from its newest "
            f"checkpoint."
        )
    return folder


def take_everywhere(config: TrainConfig, prepared: Prepared) -> tuple[Path, remote.RemoteRun | None]:
    """Acquire the run, first at its URL if it has one, so that a launch refused there changes nothing here.

    Raises:
        RequestError: another launch holds the run.
        WorkError: the previous launch woke up and saved while this one was preparing.
    """
    if isinstance(config.run_dir, Path):
        return take_run(config, prepared), None
    held, patience = prepared.held, config.patience(remote.PATIENCE, prepared.world.size)
    ahead = {folder.name: local_copy.sha256_of_state(folder) or "" for folder in prepared.ahead}
    there = remote.take(config.run_dir, held.number, held.found, patience, ahead)
    try:
        return take_run(config, prepared), there
    except BaseException:
        there.sign(ended=now())
        raise


def install(config: TrainConfig, prepared: Prepared, accelerator: Accelerator, launch: Launch) -> Prepared:
    """Bring each node's local folder of a run at a URL up to date. Only the launch that owns the run may do so.

    Returns:
        `prepared`, with the checkpoint's new folder.
    """
    if isinstance(config.run_dir, Path):
        return prepared
    if accelerator.is_main_process:
        local_copy.bring_tracker_id(open_store(config.run_dir), config.work, launch.folder)
        local_copy.install(prepared.checkpoint, config.work, launch.folder)
    accelerator.wait_for_everyone()  # nodes may share their temporary folders
    if accelerator.is_local_main_process and not accelerator.is_main_process:
        private = config.work / ".install"
        with locked(config.work.with_name(".lock")):
            shutil.rmtree(private, ignore_errors=True)  # left over by a killed process
            private.mkdir(parents=True)
            local_copy.install(prepared.checkpoint, config.work, private)
            shutil.rmtree(private)
    accelerator.wait_for_everyone()
    if prepared.checkpoint is None:
        return prepared
    folder = step_folder(config.work, prepared.checkpoint.state.step)
    return replace(prepared, checkpoint=replace(prepared.checkpoint, folder=folder))
