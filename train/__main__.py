"""Stage 2: train a diffusion model on latents. The same command resumes an interrupted run.

examples:
  python -m train --config configs/phase1.yaml
  python -m train --config configs/phase1.yaml --run_dir runs/b --optimizer.lr 5e-5
  python -m train.launch --multi_gpu --num_processes 8 -m train --config configs/phase1.yaml --num_processes 8

more commands, each with its own --help:
  python -m train check     check the data, network and checkpoint without starting the run
  python -m train plot      draw RUN/loss.png from a run's metrics
  python -m train export    export a run as a diffusers pipeline
  python -m train push      upload an exported pipeline to the Hugging Face Hub
  python -m train ema       rebuild a moving average of any width from a run's snapshots
  python -m train tell      log evaluations made after the end of training to the run's tracker
  python -m train.launch    start several processes (accelerate's launcher and its flags)
"""

from contextlib import ExitStack
from importlib import import_module

from shards.base.config import load_from_args
from shards.base.errors import console
from train import early
from train.config import TrainConfig
from train.run.preflight import World

# Modules that import torch are imported inside functions, after the checks that do not need torch.

COMMANDS = {
    "plot": "train.run.reporting.plot:plot",
    "export": "train.export.pipeline:export",
    "ema": "train.export.posthoc:rebuild_average",
    "push": "train.export.push:push",
    "tell": "train.run.reporting.notify:log_remaining",
}
"""Command → module, and the function in it that runs the command and returns what to print."""


def run(arguments: list[str]) -> None:
    """Run the subcommand that the first argument names, or train if it names none."""
    if arguments[:1] == ["check"]:
        check(arguments[1:])
        return
    if arguments and arguments[0] in COMMANDS:
        module, _, function = COMMANDS[arguments[0]].partition(":")
        print(getattr(import_module(module), function)(arguments[1:]))
        return
    config = load_from_args(TrainConfig, arguments, "train", __doc__)
    world = World.launched()
    if (message := check_without_torch(config, arguments, world)) is not None:
        print(message)
        return
    from train.start import train_here

    train_here(config, early.config_file(arguments))


def check_without_torch(config: TrainConfig, arguments: list[str], world: World) -> str | None:
    """Run the checks that do not need torch, and return the final message if the run has already finished.

    With several processes, only their number is checked here, because all of them must get the same result. The
    launcher has already run the other checks.

    Raises:
        RequestError: the number of processes is wrong, or an input of the run is missing.
    """
    world.check(config.num_processes, config.global_batch_size, config.active_group)
    is_alone = World.launched().size == 1
    return early.check_without_torch(config, early.config_file(arguments)) if is_alone else None


def check(arguments: list[str]) -> None:
    """Check the data, network and checkpoint, and print the step from which a launch would resume.

    The run is not changed. If it is at an object-store URL, the check downloads a temporary copy of its checkpoint.

    examples:
      python -m train check --config configs/phase1.yaml
      python -m train check --config configs/phase1.yaml --data.root s3://bucket/latents --num_processes 8
    """
    config = load_from_args(TrainConfig, arguments, "train check", check.__doc__)
    world = World.planned(config.num_processes)
    if (message := check_without_torch(config, arguments, world)) is not None:
        print(message.splitlines()[0])  # after this check, `make train` starts the trainer, which prints the rest
        return
    from train.prepare import prepare

    with ExitStack() as downloads:
        prepared = prepare(config, downloads=downloads, world=world)
    own = prepared.checkpoint
    if own is None:
        print(f"{config.run_dir} would start from {prepared.start or config.init_unet or 'random weights'}.")
    elif prepared.orphan is not None and own.state.step >= config.max_steps:
        print(f"{config.run_dir} would upload its last checkpoint, {own.folder.name}.")
    elif own.state.step >= config.max_steps:
        print(early.nothing_to_do(config))
    else:
        print(f"{config.run_dir} would resume after step {own.state.step} ({own.tag}, {own.folder.name}).")


main = console(run)

if __name__ == "__main__":
    main()
