"""A training launch from its config to its end: join the other processes, prepare, acquire the run, train."""

from contextlib import ExitStack, closing
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from shards.base.device import choose_device
from shards.base.errors import RequestError
from shards.base.pool import configure_malloc
from train.config import TrainConfig
from train.finish import describe_finished, nothing_to_do
from train.model.sharding import launched_sharding
from train.prepare import on_main_process, precision_of_run, prepare
from train.run.health.heartbeat import HeartbeatReporter
from train.run.health.output import kept
from train.run.launches import Launch
from train.run.processes import die_with_launcher, join_processes, lost_processes_named
from train.run.terminal import print_once
from train.setup import build_trainer
from train.takeover import install, take_everywhere

ACCELERATE_PRECISION = {"float32": "no", "float16": "fp16", "bfloat16": "bf16"}


def train_here(config: TrainConfig, config_file: Path | None) -> None:
    """Join the other processes of the run and train.

    Args:
        config_file: file of the config. The message at the end of the run lists the next phases in its folder.
    """
    die_with_launcher()
    device = choose_device(config.device)
    config = config.model_copy(update={"sharding": launched_sharding() or config.sharding})
    if config.sharding != "none" and config.precision == "float16":
        raise RequestError(
            "The launcher asks for FSDP, which this trainer does not support with float16. Set precision to bfloat16."
        )
    with closing(join_processes(config.start_timeout, device)) as heartbeat, ExitStack() as downloads:
        _train_here(config, config_file, heartbeat, device, downloads)


def _train_here(
    config: TrainConfig, config_file: Path | None, heartbeat: HeartbeatReporter, device: str, downloads: ExitStack
) -> None:
    with lost_processes_named(heartbeat):
        processes = PartialState(cpu=device == "cpu")
        precision = on_main_process(processes, lambda: precision_of_run(config, device))
        config = config.model_copy(update={"precision": precision})
        accelerator = make_accelerator(config, device)
        prepared = prepare(config, accelerator, downloads)
        if prepared.checkpoint is not None and prepared.checkpoint.state.step >= config.max_steps:
            print_once(accelerator, nothing_to_do(config))
            return
        folder, away = on_main_process(accelerator, lambda: take_everywhere(config, prepared))
    launch_number = None if away is None else away.number
    output_folder = config.work / "logs" / (folder.name if away is None else f"{away.number:04d}")
    with (
        # the launch is the outer context, because it uploads the output when it ends
        Launch(folder, accelerator.is_main_process, away) as launch,
        kept(output_folder, accelerator.process_index, config.log.keep_output),
    ):
        with lost_processes_named(heartbeat):
            prepared = install(config, prepared, accelerator, launch)
            downloads.close()
            trainer = build_trainer(config, prepared, accelerator, launch, away, heartbeat)
        trainer.fit()
        print_once(accelerator, describe_finished(config, config.max_steps, launch_number, config_file))


def make_accelerator(config: TrainConfig, device: str) -> Accelerator:
    """Configure accelerate and torch for the resolved precision, `cuda` or `cpu`, and the tracker."""
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
