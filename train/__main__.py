"""Stage 2: a latents root → a U-Net. The same command again resumes.

examples:
  python -m train --config configs/phase1.yaml
  python -m train --config configs/phase1.yaml --run_dir runs/b --optimizer.lr 5e-5
  python -m train.launch --multi_gpu --num_processes 8 -m train --config configs/phase1.yaml --num_processes 8

further commands, each with a --help of its own:
  python -m train check     check data, U-Net and earlier run; changes nothing in the run
  python -m train plot      draw RUN/loss.png from a run's metrics
  python -m train export    a run → a diffusers pipeline
  python -m train ema       a run's snapshots → an average of any width
  python -m train tell      evaluations that came after a run's end → its tracker
  python -m train.launch    several processes; accelerate's launcher and its flags
"""

import argparse
from collections.abc import Callable
from contextlib import ExitStack, closing
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
from train.prepare import install, on_main_process, precision_of_run, prepare, take_everywhere
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
    """Check data, U-Net and earlier run, and say from which step a launch would resume. Changes nothing in the run.

    For a run at an address, a checkpoint that this machine lacks is downloaded, checked and removed again.

    examples:
      python -m train check --config configs/phase1.yaml
      python -m train check --config configs/phase1.yaml --data.root s3://bucket/latents --num_processes 8
    """
    config = load_asked(TrainConfig, arguments, "train check", check.__doc__)
    with ExitStack() as downloads:
        prepared = prepare(config, downloads=downloads)
    own = prepared.checkpoint
    if own is None:
        print(f"{config.run_dir} would start from {prepared.start or config.init_unet or 'random weights'}.")
    elif own.state.step >= config.max_steps:
        print(done(config))
    else:
        print(f"{config.run_dir} would resume after step {own.state.step} ({own.tag}, {own.folder.name}).")


def done(config: TrainConfig) -> str:
    """The message for a run that has reached `max_steps`."""
    return f"{config.run_dir} has done its {config.max_steps} steps; there is nothing to do."


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
    with closing(join_processes(config.start_timeout, device)) as heart, ExitStack() as downloads:
        _train_here(config, heart, device, downloads)


def _train_here(config: TrainConfig, heart: Heart, device: str, downloads: ExitStack) -> None:
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
        prepared = prepare(config, accelerator, downloads)
        if prepared.checkpoint is not None and prepared.checkpoint.state.step >= config.max_steps:
            accelerator.print(done(config))
            return
        folder, away = on_main_process(accelerator, lambda: take_everywhere(config, prepared))
    rank, launches = accelerator.process_index, config.log.keep_output
    number = folder.name if away is None else f"{away.number:04d}"
    with (
        Launch(folder, accelerator.is_main_process, away) as launch,  # which shares what was kept, to the last word
        kept(config.work / "logs" / number, rank, launches),
    ):
        with lost_processes_named(heart):
            prepared = install(config, prepared, accelerator, launch)
            downloads.close()
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
