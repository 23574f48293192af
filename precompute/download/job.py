"""Many shards: what is missing is fetched by worker processes, and tried again where it fails."""

import errno
import json
import shutil
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from precompute.download.config import DownloadConfig
from precompute.download.fetch import ATTEMPTS_NAME, RECEIPT, fetch_tar
from precompute.download.report import stats_path
from precompute.download.rows import PlannedTar
from precompute.download.verify import check_tar
from shards.base.errors import WorkError
from shards.base.pool import start_pool

SHARDS_PER_WORKER = 20  # then a fresh process, so that leaks stay small
WORKER_DIED = "a worker process died (out of memory, or killed)"

Fetch = Callable[[DownloadConfig, PlannedTar], dict[str, Any]]


def fetch_missing(
    config: DownloadConfig, shards: list[PlannedTar], fetch: Fetch = fetch_tar
) -> tuple[int, dict[str, str]]:
    """Download the shards that are not published.

    Returns:
        how many were published now; and name → reason for those that failed `shard_attempts` times.

    Raises:
        WorkError: the disk is full.
    """
    shutil.rmtree(config.output / ATTEMPTS_NAME, ignore_errors=True)  # of a run that was killed
    missing = [shard for shard in shards if not is_published(config, shard)]
    print(f"{len(shards) - len(missing)} of {len(shards)} shards are there, {len(missing)} to fetch.", flush=True)
    waiting, tries, failed = deque(missing), Counter[str](), dict[str, str]()
    own_reasons: dict[str, str] = {}  # a process that dies is held against all that ran; this one is the shard's
    while waiting:
        for shard, outcome in _fetch_until_broken(config, waiting, fetch):
            tries[shard.name] += 1
            if isinstance(outcome, str) and outcome != WORKER_DIED:
                own_reasons[shard.name] = outcome
            if isinstance(outcome, dict):
                print(f"{shard.name}: {_describe(outcome)}", flush=True)
            elif tries[shard.name] < config.shard_attempts:
                print(f"{shard.name} failed, and is tried again: {outcome}", flush=True)
                waiting.append(shard)
            else:
                print(f"{shard.name} failed: {outcome}", flush=True)
                failed[shard.name] = own_reasons.get(shard.name, outcome)
    shutil.rmtree(config.output / ATTEMPTS_NAME, ignore_errors=True)
    return len(missing) - len(failed), failed


def is_published(config: DownloadConfig, shard: PlannedTar) -> bool:
    """Whether the shard's three files are there and whole, as far as sizes say, or hashes where `recheck` is set.

    A damaged one counts as missing, and is fetched again.
    """
    stats, tar = stats_path(config.output, shard), config.output / f"{shard.name}.tar"
    if not stats.exists():
        return False
    try:
        receipt = json.loads(stats.read_text())[RECEIPT]
        whole = tar.stat().st_size == receipt["tar_bytes"] and (config.output / f"{shard.name}.parquet").exists()
        if whole and config.recheck:
            whole = check_tar(config.output, shard.name, shard.num_rows, config) == receipt
    except (OSError, ValueError, KeyError, WorkError) as error:
        print(f"{shard.name} is damaged, and is fetched again: {error}", flush=True)
        return False
    if not whole:
        print(f"{shard.name} is not the tar that was published, and is fetched again.", flush=True)
    return whole


def _fetch_until_broken(config: DownloadConfig, waiting: deque[PlannedTar], fetch: Fetch) -> Any:
    """(shard, its stats or why it failed) as shards end; returns when `waiting` is empty or a worker process died.

    No more shards are handed out than processes run, so a dead process takes only those few with it.
    """
    running: dict[Future[dict[str, Any]], PlannedTar] = {}
    with start_pool(min(config.processes, len(waiting)), SHARDS_PER_WORKER) as pool:
        is_broken = False
        while running or (waiting and not is_broken):
            while waiting and not is_broken and len(running) < config.processes:
                try:
                    running[pool.submit(fetch, config, waiting[0])] = waiting[0]
                    waiting.popleft()
                except BrokenProcessPool:  # a process died since the last shard ended
                    is_broken = True
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                error = future.exception()
                is_broken |= isinstance(error, BrokenProcessPool)
                yield running.pop(future), future.result() if error is None else _explain(error, config)


def _explain(error: BaseException, config: DownloadConfig) -> str:
    if isinstance(error, BrokenProcessPool):
        return WORKER_DIED
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        raise WorkError(
            f"No space is left in {config.output}. The published shards stay: free some space, and the same command "
            "fetches the others."
        )
    if isinstance(error, WorkError | OSError):
        return str(error)
    raise error


def _describe(stats: dict[str, Any]) -> str:
    return (
        f"{stats['successes']} of {stats['count']} pictures in {stats['duration']:.1f} s "
        f"({stats['successes'] / max(stats['duration'], 1e-3):.0f}/s, {stats[RECEIPT]['tar_bytes'] / 1e6:.1f} MB)"
    )
