"""Stage 2: a latents root → a U-Net. The same command again resumes.

examples:
  python -m train --config configs/phase1.yaml
  python -m train --config configs/phase1.yaml --run_dir runs/b --optimizer.lr 5e-5
  python -m train.launch --multi_gpu --num_processes 8 -m train --config configs/phase1.yaml --num_processes 8

further commands, each with a --help of its own:
  python -m train check     is the request sound? data, U-Net and earlier run; writes nothing
  python -m train plot      draw RUN/loss.png from a run's metrics
  python -m train export    a run → a diffusers pipeline
  python -m train ema       a run's snapshots → an average of any width
  python -m train tell      evaluations that came after a run's end → its tracker
  python -m train.launch    several processes; accelerate's launcher and its flags
"""

import argparse
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from shards.base.config import load_asked
from shards.base.device import choose_device
from shards.base.errors import RequestError, console
from shards.base.pool import keep_memory
from train.assemble import assemble
from train.config import TrainConfig
from train.export.pipeline import export
from train.export.posthoc import rebuild_average
from train.loop import train
from train.model.sharding import launched_sharding
from train.prepare import on_main_process, precision_of_run, prepare, take_address, take_run
from train.run.health.heartbeat import Heart
from train.run.health.output import kept
from train.run.launches import Launch
from train.run.processes import die_with_launcher, join_processes, lost_processes_named
from train.run.telling.plot import plot_run
from train.run.telling.tell import tell_finished

ACCELERATE_PRECISION = {"float32": "no", "float16": "fp16", "bfloat16": "bf16"}


def run(arguments: list[str]) -> None:
    """Dispatch on the first word."""
    if arguments[:1] and arguments[0] in COMMANDS:
        COMMANDS[arguments[0]](arguments[1:])
    else:
        train_here(load_asked(TrainConfig, arguments, "train", __doc__))


def check(arguments: list[str]) -> None:
    """Is the request sound? Looks at data, U-Net and earlier run, and writes nothing.

    examples:
      python -m train check --config configs/phase1.yaml
      python -m train check --config configs/phase1.yaml --data.root s3://bucket/latents --num_processes 8
    """
    prepare(load_asked(TrainConfig, arguments, "train check", check.__doc__))


def plot(arguments: list[str]) -> None:
    """Draw RUN/loss.png from its metrics."""
    epilog = "example: python -m train plot runs/phase1"
    parser = argparse.ArgumentParser(prog="python -m train plot", description=plot.__doc__, epilog=epilog)
    parser.add_argument("run", type=Path)
    print(plot_run(parser.parse_args(arguments).run))


def train_here(config: TrainConfig) -> None:
    """Join the run's other processes and train."""
    die_with_launcher()
    device = choose_device(config.device)
    config = config.model_copy(update={"sharding": launched_sharding() or config.sharding})
    if config.sharding != "none" and config.precision == "float16":
        raise RequestError(
            "The launcher asks for FSDP, which float16 does not go with here. Set precision to bfloat16."
        )
    with closing(join_processes(config.start_timeout, device)) as heart:
        _train_here(config, heart, device)


def _train_here(config: TrainConfig, heart: Heart, device: str) -> None:
    with lost_processes_named(heart):
        processes = PartialState(cpu=device == "cpu")
        precision = on_main_process(processes, lambda: precision_of_run(config, device))
        config = config.model_copy(update={"precision": precision})
        accelerator = Accelerator(
            mixed_precision=ACCELERATE_PRECISION[config.precision],
            cpu=device == "cpu",
            log_with=config.log.tracker if config.log.tracker in LOGGER_TYPE_TO_CLASS else None,
            project_dir=config.work,
            kwargs_handlers=[config.ddp.handler()],
        )
        torch.backends.cudnn.allow_tf32 = False
        if accelerator.device.type == "cpu":
            keep_memory()
        prepared = prepare(config, accelerator)
        if prepared.checkpoint is not None and prepared.checkpoint.state.step >= config.max_steps:
            accelerator.print(f"{config.run_dir} has done its {config.max_steps} steps; there is nothing to do.")
            return
        folder, away = on_main_process(
            accelerator, lambda: (take_run(config, prepared), take_address(config, prepared))
        )
    rank, launches = accelerator.process_index, config.log.keep_output
    number = folder.name if away is None else f"{away.number:04d}"
    with (
        Launch(folder, accelerator.is_main_process, away) as launch,  # which shares what was kept, to the last word
        kept(config.work / "logs" / number, rank, launches),
    ):
        with lost_processes_named(heart):
            run = assemble(config, prepared, accelerator, launch, away, heart)
        train(run)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "check": check,
    "plot": plot,
    "export": lambda arguments: print(export(arguments)),
    "ema": lambda arguments: print(rebuild_average(arguments)),
    "tell": lambda arguments: print(tell_finished(arguments)),
}

main = console(run)

if __name__ == "__main__":
    main()
