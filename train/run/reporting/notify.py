"""What `evaluation watch` found after training had ended, told to the run's tracker.

examples:
  python -m train tell runs/phase2
  python -m train tell s3://bucket/phase2
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator

from shards.base.config import Config, load_for_run
from shards.base.errors import RequestError
from shards.base.store import Place, Store
from shards.open import open_store
from train.run.checkpoints import remote
from train.run.checkpoints.checkpoint import list_checkpoints, step_of
from train.run.checkpoints.local_copy import bring_tracker_id, find_checkpoints
from train.run.launches import Launch, take
from train.run.preflight import check_tracker
from train.run.reporting.config import LogConfig
from train.run.reporting.evaluations import TOLD_BY_WATCHERS, note_told, read_sheet, tell, untold
from train.run.reporting.tracker import start_tracker


class TellConfig(Config):
    """Tell a finished run's tracker of evaluations that came after its end."""


def tell_finished(arguments: list[str]) -> str:
    """Parse the command line, and tell; returns what was done, for people.

    Raises:
        RequestError: there is no such run, it is trained in, or it has not done all its steps.
    """
    place, _ = load_for_run(TellConfig, arguments, "train tell", __doc__)
    store = open_store(place)
    settings = read_settings(store)
    config, last = LogConfig.model_validate(settings["log"]), settings["max_steps"]
    if config.tracker in TOLD_BY_WATCHERS or not untold(store):
        return f"{place}: there is nothing that its tracker ({config.tracker}) has not been told."
    check_tracker(config.tracker)
    with held(place, store, last, settings["takeover_after"]) as launch:
        accelerator = Accelerator(cpu=True, log_with=config.tracker, project_dir=launch.run_dir)
        start_tracker(config, accelerator, settings, launch.folder)
        trackers = accelerator.trackers
        own = max((tracker.tracker.step for tracker in trackers if tracker.name == "wandb"), default=0)
        sheets = [sheet for name in untold(store) if (sheet := read_sheet(store, name)) is not None]
        for now, sheet in enumerate(sheets, max(own, last + 1)):
            tell(trackers, sheet, now)
            note_told(store, sheet.name)
        accelerator.end_training()
    return f"{place}: {config.tracker} was told of {len(sheets)} evaluations."


def read_settings(store: Store) -> dict[str, Any]:
    """A run's config, as its last launch resolved it.

    Raises:
        RequestError: there is none.
    """
    try:
        settings: dict[str, Any] = yaml.safe_load(store.read("config.yaml"))
    except FileNotFoundError:
        raise RequestError(
            f"{store.where()} holds no run: it has no config.yaml. Give a run_dir, or its address."
        ) from None
    return settings


@contextmanager
def held(place: Place, store: Store, last: int, patience: float) -> Iterator[Launch]:
    """The run, taken as by a launch, so that no other tells its tracker anything meanwhile.

    Raises:
        RequestError: another launch holds it, or it goes on: its next launch tells.
    """
    names = [path.name for path in list_checkpoints(place)] if isinstance(place, Path) else find_checkpoints(store)
    step = max((step_of(Path(name)) for name in names), default=0)
    if step < last:
        raise RequestError(
            f"{place} has done {step} of its {last} steps. The launch that trains on tells the tracker of "
            f"evaluations: there is nothing to do."
        )
    if isinstance(place, Path):
        with Launch(take(place, patience)) as launch:
            yield launch
        return
    number = remote.wait_until_free(store, patience)
    there = remote.take(place, number, find_checkpoints(store))
    with tempfile.TemporaryDirectory(prefix="latentmill-") as scratch:
        work = Path(scratch) / place.rstrip("/").rpartition("/")[2]
        work.mkdir()
        with Launch(take(work, patience), away=there) as launch:
            bring_tracker_id(store, work, launch.folder)
            yield launch
