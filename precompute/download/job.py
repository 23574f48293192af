"""The download job: fetch the missing tars in worker processes, and retry those that fail."""

import errno
import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from typing import Any

from precompute.download.config import DownloadConfig
from precompute.download.fetch import ATTEMPTS_NAME, RECEIPT, fetch_tar
from precompute.download.report import stats_path
from precompute.download.rows import PlannedTar
from precompute.download.verify import check_tar
from shards.base.errors import WorkError
from shards.base.pool import run_each

TARS_PER_WORKER = 20
"""Number of tars after which a worker process is replaced, so that memory leaks stay small."""
WORKER_DIED = "a worker process died (out of memory, or killed)"

Fetch = Callable[[DownloadConfig, PlannedTar], dict[str, Any]]


def fetch_missing(
    config: DownloadConfig, tars: list[PlannedTar], fetch: Fetch = fetch_tar
) -> tuple[int, dict[str, str]]:
    """Download the tars that are not published yet, or raise WorkError if the disk is full.

    Returns:
        The number of tars published by this call, and a dict from the name of each tar that failed `shard_attempts`
        times to the reason for its failure.
    """
    shutil.rmtree(config.output / ATTEMPTS_NAME, ignore_errors=True)  # left by a killed run
    missing = [tar for tar in tars if not is_published(config, tar)]
    print(
        f"{len(tars) - len(missing)} of {len(tars)} tars are complete, with {len(missing)} left to download.",
        flush=True,
    )
    attempts, failed = Counter[str](), dict[str, str]()
    # When a worker dies, every tar in progress fails, so a reason that is specific to a tar takes precedence.
    own_reasons: dict[str, str] = {}
    waiting = missing
    while waiting:
        retries: list[PlannedTar] = []
        calls = run_each(
            functools.partial(fetch, config), waiting, config.processes, max_tasks_per_child=TARS_PER_WORKER
        )
        with closing(calls) as finished:
            for tar, future in finished:
                attempts[tar.name] += 1
                if (error := future.exception()) is None:
                    print(f"{tar.name}: {_describe(future.result())}", flush=True)
                    continue
                reason = _explain(error, config)
                if reason != WORKER_DIED:
                    own_reasons[tar.name] = reason
                if attempts[tar.name] < config.shard_attempts:
                    print(f"tar {tar.name} failed and will be retried: {reason}", flush=True)
                    retries.append(tar)
                else:
                    print(f"tar {tar.name} failed: {reason}", flush=True)
                    failed[tar.name] = own_reasons.get(tar.name, reason)
        waiting = retries
    shutil.rmtree(config.output / ATTEMPTS_NAME, ignore_errors=True)
    return len(missing) - len(failed), failed


def is_published(config: DownloadConfig, tar: PlannedTar) -> bool:
    """Return whether the tar's three files exist and the tar is intact. Checks the tar's size or, with `recheck`,
    all of its content."""
    stats, file = stats_path(config.output, tar), config.output / f"{tar.name}.tar"
    if not stats.exists():
        return False
    try:
        receipt = json.loads(stats.read_text())[RECEIPT]
        intact = file.stat().st_size == receipt["tar_bytes"] and (config.output / f"{tar.name}.parquet").exists()
        if intact and config.recheck:
            intact = check_tar(config.output, tar.name, tar.num_rows, config) == receipt
    except (OSError, ValueError, KeyError, TypeError, WorkError) as error:
        print(f"tar {tar.name} is damaged and will be downloaded again: {error}", flush=True)
        return False
    if not intact:
        print(f"tar {tar.name} has changed since it was published and will be downloaded again.", flush=True)
    return intact


def _explain(error: BaseException, config: DownloadConfig) -> str:
    """Return the reason why a tar failed. Raises WorkError, which ends the whole run, if the disk is full. Unexpected
    exceptions are re-raised, because they are bugs."""
    if isinstance(error, BrokenProcessPool):
        return WORKER_DIED
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        raise WorkError(
            f"No space is left in {config.output}. Published tars are kept. Free some space, and run the same command "
            "again to download the others."
        )
    if isinstance(error, WorkError | OSError):
        return str(error)
    raise error


def _describe(stats: dict[str, Any]) -> str:
    return (
        f"{stats['successes']} of {stats['count']} images in {stats['duration']:.1f} s "
        f"({stats['successes'] / max(stats['duration'], 1e-3):.0f}/s, {stats[RECEIPT]['tar_bytes'] / 1e6:.1f} MB)"
    )
