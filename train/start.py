"""A training launch from start to finish: joining the other processes, preparing, acquiring the run and training."""

import os
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import ProjectConfiguration

from shards.base.device import choose_device
from shards.base.errors import RequestError
from shards.base.pool import configure_malloc
from shards.open import open_store
from shards.root.shared import check_create_if_absent
from train.config import TrainConfig
from train.early import describe_finished, nothing_to_do
from train.prepare import Prepared, on_main_process, precision_of_run, prepare
from train.run.checkpoints import local_copy
from train.run.checkpoints.checkpoint import step_folder
from train.run.checkpoints.remote import PATIENCE, RemoteRun
from train.run.health.heartbeat import HeartbeatReporter
from train.run.health.output import tee_output
from train.run.lease.lease import Lease
from train.run.preflight import check_shared
from train.run.processes import die_with_launcher, explain_lost_processes, join_processes, print_once
from train.setup import build_trainer

ACCELERATE_PRECISION = {"float32": "no", "float16": "fp16", "bfloat16": "bf16"}


def train_here(config: TrainConfig, config_file: Path | None) -> None:
    """Join the other processes of the run and train.

    Args:
        config_file: the config file. The final message lists the configs in the same folder that start from this run.

    Raises:
        RequestError: the launcher requests FSDP.
    """
    die_with_launcher()
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise RequestError(
            "The launcher requests FSDP, but this trainer shards the weights itself. Launch with "
            "configs/accelerate/ddp.yaml, and set `--sharding full` or `--sharding grad_op`."
        )
    device = choose_device(config.device)
    with closing(join_processes(config.start_timeout, device)) as heartbeat, ExitStack() as downloads:
        _train_here(config, config_file, heartbeat, device, downloads)


def _train_here(
    config: TrainConfig, config_file: Path | None, heartbeat: HeartbeatReporter, device: str, downloads: ExitStack
) -> None:
    with explain_lost_processes(heartbeat):
        processes = PartialState(cpu=device == "cpu")
        precision = on_main_process(processes, lambda: precision_of_run(config, device))
        config = config.model_copy(update={"precision": precision})
        accelerator = make_accelerator(config, device)
        prepared = prepare(config, accelerator, downloads)
        done = prepared.checkpoint is not None and prepared.checkpoint.state.step >= config.max_steps
        if done and prepared.orphan is None:  # otherwise, the last checkpoint has yet to be uploaded
            print_once(accelerator, nothing_to_do(config))
            return
        lease = on_main_process(accelerator, lambda: acquire(config, prepared))
        if not accelerator.is_main_process:  # on another machine, temporary folders may have another path
            lease.backend = local_copy.lease_backend(config.run_dir)
    accelerator.project_configuration = ProjectConfiguration(str(lease.run_dir), str(lease.run_dir))
    remote = None
    if isinstance(config.run_dir, str):
        remote = RemoteRun(open_store(config.run_dir), lease, config.patience(PATIENCE, prepared.world.size))
    is_main, output_folder = accelerator.is_main_process, lease.run_dir / "logs" / f"{lease.number:04d}"
    with (
        lease if is_main else nullcontext(),
        # uploads the output on exit, after `tee_output` has closed it
        remote.logs_uploaded_at_exit() if is_main and remote is not None else nullcontext(),
        tee_output(output_folder, accelerator.process_index, config.log.keep_output),
    ):
        with explain_lost_processes(heartbeat):
            prepared = install(config, prepared, accelerator, lease)
            downloads.close()
            trainer = build_trainer(config, prepared, accelerator, lease, remote, heartbeat)
        trainer.fit()
        launch_number = None if remote is None else lease.number
        print_once(accelerator, describe_finished(config, trainer.state.step, launch_number, config_file))


def make_accelerator(config: TrainConfig, device: str) -> Accelerator:
    """Configure accelerate and torch for the device (`cuda` or `cpu`), the precision and the tracker.

    The precision must not be `auto`.
    """
    accelerator = Accelerator(
        mixed_precision=ACCELERATE_PRECISION[config.precision],
        cpu=device == "cpu",
        log_with=config.log.tracker if config.log.tracker in LOGGER_TYPE_TO_CLASS else None,
        project_dir=config.work,
        kwargs_handlers=[config.ddp.handler()],
    )
    torch.backends.cudnn.allow_tf32 = False
    if accelerator.device.type == "cpu":
        configure_malloc()
    return accelerator


def acquire(config: TrainConfig, prepared: Prepared) -> Lease:
    """Acquire the run for this launch.

    Raises:
        RequestError: `run_dir` is on a store that ignores create-if-absent.
        RunInUse: another launch holds the run.
        WorkError: the previous launch resumed and saved a checkpoint while this launch was preparing.
    """
    orphan = prepared.orphan
    orphans = {} if orphan is None else {orphan.name: local_copy.sha256_of_state(orphan) or ""}
    backend = local_copy.lease_backend(config.run_dir)
    if isinstance(config.run_dir, str):
        check_create_if_absent(backend.store, "several launches could train in this run_dir at once and damage the run")
    return Lease.acquire(backend, config.takeover_after, prepared.seen._replace(orphans=orphans))


def install(config: TrainConfig, prepared: Prepared, accelerator: Accelerator, lease: Lease) -> Prepared:
    """Set up each node's local folder if the run is at a URL. Otherwise check that the nodes share its folder.

    Returns:
        `prepared`, updated with the new folder of the checkpoint.

    Raises:
        LeaseLost: another launch has taken over.
        RequestError: a node does not see the run's folder.
    """
    if isinstance(config.run_dir, Path):
        check_shared(accelerator, "run_dir", lease.folder)
        return prepared
    if accelerator.is_local_main_process:
        local_copy.install(prepared.checkpoint, lease, open_store(config.run_dir), config.work)
    accelerator.wait_for_everyone()
    if prepared.checkpoint is None:
        return prepared
    folder = step_folder(lease.run_dir, prepared.checkpoint.state.step)
    return replace(prepared, checkpoint=replace(prepared.checkpoint, folder=folder))
