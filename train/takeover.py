"""How a launch acquires the run that `prepare` examined, and sets up this machine's copy of it."""

from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator

from shards.open import open_store
from train.config import TrainConfig
from train.prepare import Prepared
from train.run.checkpoints import local_copy
from train.run.checkpoints.checkpoint import step_folder
from train.run.lease.lease import Lease


def acquire(config: TrainConfig, prepared: Prepared) -> Lease:
    """Acquire the run for this launch.

    Raises:
        RunInUse: another launch holds the run.
        WorkError: the previous launch woke up and saved while this one was preparing.
    """
    orphan = prepared.orphan
    orphans = {} if orphan is None else {orphan.name: local_copy.sha256_of_state(orphan) or ""}
    backend = local_copy.lease_backend(config.run_dir)
    return Lease.acquire(backend, config.takeover_after, prepared.seen._replace(orphans=orphans))


def install(config: TrainConfig, prepared: Prepared, accelerator: Accelerator, lease: Lease) -> Prepared:
    """Set up each node's local folder of a run at a URL.

    Returns:
        `prepared`, with the checkpoint's new folder.

    Raises:
        LeaseLost: another launch has taken over.
    """
    if isinstance(config.run_dir, Path):
        return prepared
    if accelerator.is_local_main_process:
        local_copy.install(prepared.checkpoint, lease, open_store(config.run_dir), config.work)
    accelerator.wait_for_everyone()
    if prepared.checkpoint is None:
        return prepared
    folder = step_folder(lease.run_dir, prepared.checkpoint.state.step)
    return replace(prepared, checkpoint=replace(prepared.checkpoint, folder=folder))
