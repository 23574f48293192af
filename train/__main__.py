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
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from shards.base.config import load_from_args
from shards.base.errors import console

if TYPE_CHECKING:
    from train.config import TrainConfig

# Modules that import torch are imported inside the functions, after what can be checked without them.


def run(arguments: list[str]) -> None:
    """Dispatch on the first word."""
    if arguments[:1] and arguments[0] in COMMANDS:
        COMMANDS[arguments[0]](arguments[1:])
        return
    config = read_config(arguments, "train", __doc__)
    if (answer := answer_early(config, arguments)) is not None:
        print(answer)
        return
    from train.early import config_file
    from train.start import train_here

    train_here(config, config_file(arguments))


def read_config(arguments: list[str], prog: str, about: str | None) -> "TrainConfig":
    """Read the config that the arguments name."""
    from train.config import TrainConfig

    return load_from_args(TrainConfig, arguments, prog, about)


def answer_early(config: "TrainConfig", arguments: list[str]) -> str | None:
    """Check what needs no torch; return the message of a finished run.

    Of several processes none looks, since the answer must be the same for all: their launcher has looked.

    Raises:
        RequestError: the processes do not fit the request, or something that the config names is missing.
    """
    from train import early
    from train.run.preflight import World

    world = World.launched()
    world.check(config.num_processes, config.global_batch_size)
    return early.answer_early(config, early.config_file(arguments)) if world.size == 1 else None


def check(arguments: list[str]) -> None:
    """Check data, U-Net and earlier run, and say from which step a launch would resume. Changes nothing in the run.

    For a run at an address, a checkpoint that this machine lacks is downloaded, checked and removed again.

    examples:
      python -m train check --config configs/phase1.yaml
      python -m train check --config configs/phase1.yaml --data.root s3://bucket/latents --num_processes 8
    """
    config = read_config(arguments, "train check", check.__doc__)
    if (answer := answer_early(config, arguments)) is not None:
        print(answer.splitlines()[0])  # `make train` goes on to the trainer, which says the rest
        return
    from train.finish import nothing_to_do
    from train.prepare import prepare

    with ExitStack() as downloads:
        prepared = prepare(config, downloads=downloads)
    own = prepared.checkpoint
    if own is None:
        print(f"{config.run_dir} would start from {prepared.start or config.init_unet or 'random weights'}.")
    elif own.state.step >= config.max_steps:
        print(nothing_to_do(config))
    else:
        print(f"{config.run_dir} would resume after step {own.state.step} ({own.tag}, {own.folder.name}).")


def plot(arguments: list[str]) -> None:
    """Draw RUN/loss.png from its metrics."""
    from train.run.telling.plot import plot_run

    epilog = "example: python -m train plot runs/phase1"
    parser = argparse.ArgumentParser(prog="python -m train plot", description=plot.__doc__, epilog=epilog)
    parser.add_argument("run", type=Path)
    print(plot_run(parser.parse_args(arguments).run))


def export(arguments: list[str]) -> None:
    from train.export.pipeline import export

    print(export(arguments))


def ema(arguments: list[str]) -> None:
    from train.export.posthoc import rebuild_average

    print(rebuild_average(arguments))


def tell(arguments: list[str]) -> None:
    from train.run.telling.tell import tell_finished

    print(tell_finished(arguments))


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "check": check,
    "plot": plot,
    "export": export,
    "ema": ema,
    "tell": tell,
}

main = console(run)

if __name__ == "__main__":
    main()
