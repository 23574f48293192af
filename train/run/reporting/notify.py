"""Log evaluations made after the end of training to the run's tracker.

During training, the trainer itself logs evaluations.

examples:
  python -m train tell runs/phase2
  python -m train tell s3://bucket/phase2
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator

from shards.base.config import Config, load_for_run
from shards.base.errors import RequestError
from shards.base.store import Place, Store
from shards.base.table import counted
from shards.open import open_store
from train.run.checkpoints.checkpoint import TRACKER_ID, list_checkpoints, step_of
from train.run.checkpoints.local_copy import download_log, find_checkpoints, lease_backend
from train.run.checkpoints.remote import RemoteRun
from train.run.lease.lease import Lease
from train.run.preflight import check_tracker
from train.run.recorded import run_config
from train.run.reporting.config import LogConfig
from train.run.reporting.evaluations import is_logged_by_trainer, list_unlogged, log_results, mark_logged, read_results
from train.run.reporting.tracker import start_tracker


class TellConfig(Config):
    """Options of `python -m train tell`. It has no options other than the run."""


def log_remaining(arguments: list[str]) -> str:
    """Run `python -m train tell` with these arguments, and return a summary to print.

    Raises:
        RequestError: there is no such run, a launch holds it, or it has steps left.
    """
    place, _ = load_for_run(TellConfig, arguments, "train tell", __doc__)
    store = open_store(place)
    settings = run_config(store)
    config, last_step = LogConfig.model_validate(settings["log"]), settings["max_steps"]
    if not is_logged_by_trainer(config.tracker) or not list_unlogged(store):
        return f"{place}: there are no evaluations left to log (log.tracker is {config.tracker})."
    check_tracker(config.tracker)
    with hold(place, store, last_step, settings["takeover_after"]) as lease:
        accelerator = Accelerator(cpu=True, log_with=config.tracker, project_dir=lease.run_dir)
        start_tracker(config, accelerator, settings, lease.folder)
        trackers = accelerator.trackers
        readable = [results for name in list_unlogged(store) if (results := read_results(store, name)) is not None]
        # in wandb, each evaluation gets its own row, after all existing rows
        wandb_step = max((tracker.tracker.step for tracker in trackers if tracker.name == "wandb"), default=0)
        for step, results in enumerate(readable, max(wandb_step, last_step + 1)):
            log_results(trackers, results, step)
            mark_logged(store, results.name)
        accelerator.end_training()
    return f"{place}: logged {counted(len(readable), 'evaluation')} to {config.tracker}."


@contextmanager
def hold(place: Place, store: Store, last: int, ttl: float) -> Iterator[Lease]:
    """Hold the lease of a finished run, so that no other process writes to the run in its tracker.

    Args:
        last: the last step of the run.
        ttl: seconds without a heartbeat after which the holder counts as dead.

    Raises:
        RequestError: another launch holds the run, or the run has steps left, in which case the launch that resumes it
            will log the evaluations.
    """
    names = [path.name for path in list_checkpoints(place)] if isinstance(place, Path) else find_checkpoints(store)
    step = max((step_of(Path(name)) for name in names), default=0)
    if step < last:
        raise RequestError(
            f"{place} has completed {step} of its {last} steps. The launch that resumes the run will log the "
            f"evaluations, so there is nothing to do."
        )
    with (
        tempfile.TemporaryDirectory(prefix="latentmill-") as scratch,
        Lease.acquire(lease_backend(place, Path(scratch)), ttl) as lease,
    ):
        if isinstance(place, Path):
            yield lease
            return
        lease.folder.mkdir(parents=True)
        download_log(TRACKER_ID, store, lease.run_dir, lease.folder)
        with RemoteRun(store, lease).logs_uploaded_at_exit():
            yield lease
