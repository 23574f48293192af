"""Checks without torch, so that most invalid requests fail within a second. `prepare` repeats them."""

import argparse
from pathlib import Path

from shards.base.errors import RequestError
from shards.base.store import Place
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from train.config import TrainConfig
from train.finish import describe_if_finished
from train.run.checkpoints.checkpoint import list_checkpoints
from train.run.preflight import check_run_dir


def check_without_torch(config: TrainConfig, file: Path | None) -> str | None:
    """Return the final message if the run has already finished; otherwise check that its inputs exist.

    If several processes train, only one may call this, before the others start.

    Args:
        file: file of the config.

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
    """Check that the latents roots exist, and the run to start from if the config names one.

    Raises:
        RequestError: a root is missing, or the run to start from has no checkpoint.
    """
    is_new = isinstance(config.run_dir, Path) and not list_checkpoints(config.run_dir)
    if is_new and isinstance(config.init_from, Path) and not list_checkpoints(config.init_from):
        raise no_checkpoint(config.init_from)
    validation = [] if config.validation.root is None else [config.validation.root]
    for place in dict.fromkeys([*(stream.root for stream in config.data.streams), *validation]):
        EncodingRecord.load(open_store(place))


def no_checkpoint(run_dir: Place) -> RequestError:
    """Build the error for an `init_from` without a complete checkpoint."""
    return RequestError(
        f"init_from: {run_dir} has no complete checkpoint. Train that phase first (`make train PHASE=1`), or set "
        f"init_from to a run that has one."
    )
