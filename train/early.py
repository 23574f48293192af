"""Checks that need no torch, so that most wrong requests are refused in a second. `prepare` repeats them."""

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


def answer_early(config: TrainConfig, file: Path | None) -> str | None:
    """Check the config, and return the final message if the run has already finished; None: there is work to do.

    If several processes train, only one may call this, before the others start.

    Args:
        file: file of the config.

    Raises:
        RequestError: something that the config names is missing, and the run has not finished.
    """
    check_run_dir(config.work)
    finished = describe_if_finished(config, file)
    if finished is None:
        check_early(config)
    return finished


def config_file(arguments: list[str]) -> Path | None:
    """Return the file that `--config` names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    found: Path | None = parser.parse_known_args(arguments)[0].config
    return found


def check_early(config: TrainConfig) -> None:
    """Check that the roots and the run to start from exist.

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
    """Build the error for a run to start from that has no checkpoint."""
    return RequestError(
        f"init_from: {run_dir} has no complete checkpoint. Train that phase first (`make train PHASE=1`), or set "
        f"init_from to a run that has one."
    )
