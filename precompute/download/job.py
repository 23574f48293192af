"""Many shards: what is missing is fetched by worker processes, tried again where it fails, and reported."""

import json
import multiprocessing
import os
import shutil
import threading
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from precompute.download.config import DownloadConfig
from precompute.download.fetch import RECEIPT, fetch_shard
from precompute.download.plan import InputShard
from precompute.download.report import stats_path
from precompute.download.verify import check_shard
from shards.errors import WorkError

SHARDS_PER_WORKER = 20  # then a fresh process: img2dataset's own pool does so against leaks


def fetch_missing(config: DownloadConfig, shards: list[InputShard]) -> tuple[int, dict[str, str]]:
    """Download the shards that are not published.

    Returns:
        how many were published now; and name → reason for those that failed `shard_attempts` times.
    """
    shutil.rmtree(config.output / ".attempts", ignore_errors=True)  # of a run that was killed
    missing = [shard for shard in shards if not is_published(config, shard)]
    print(f"{len(shards) - len(missing)} of {len(shards)} shards are there, {len(missing)} to fetch.", flush=True)
    num_missing, failed = len(missing), dict[str, str]()
    for attempt in range(config.shard_attempts):
        if not missing:
            break
        if attempt:
            print(f"Trying {len(missing)} shards again.", flush=True)
        failed = _fetch_all(config, missing)
        missing = [shard for shard in missing if shard.name in failed]
    shutil.rmtree(config.output / ".attempts", ignore_errors=True)
    return num_missing - len(failed), failed


def is_published(config: DownloadConfig, shard: InputShard) -> bool:
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
            whole = check_shard(config.output, shard.name, shard.num_rows, config) == receipt
    except (OSError, ValueError, KeyError, WorkError) as error:
        print(f"{shard.name}: {error}; it is fetched again.", flush=True)
        return False
    if not whole:
        print(f"{shard.name}: the tar is not the one that was published; it is fetched again.", flush=True)
    return whole


def _fetch_all(config: DownloadConfig, shards: list[InputShard]) -> dict[str, str]:
    """Fetch each shard once; name → reason for those that failed."""
    failed: dict[str, str] = {}
    with _start_workers(config, len(shards)) as pool:
        futures: dict[Future[dict[str, Any]], InputShard] = {
            pool.submit(fetch_shard, config, shard): shard for shard in shards
        }
        for number, future in enumerate(as_completed(futures), 1):
            name = futures[future].name
            try:
                print(f"[{number}/{len(shards)}] {name}: {_describe(future.result())}", flush=True)
            except (WorkError, OSError) as error:
                failed[name] = str(error)
            except BrokenProcessPool:
                failed[name] = "a worker process died (out of memory, or killed)"
            if name in failed:
                print(f"[{number}/{len(shards)}] {name} failed: {failed[name]}", flush=True)
    return failed


def _describe(stats: dict[str, Any]) -> str:
    return (
        f"{stats['successes']} of {stats['count']} pictures in {stats['duration']:.1f} s "
        f"({stats['successes'] / max(stats['duration'], 1e-3):.0f}/s, {stats[RECEIPT]['tar_bytes'] / 1e6:.1f} MB)"
    )


def _start_workers(config: DownloadConfig, num_shards: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        max_workers=min(config.processes, num_shards),
        mp_context=multiprocessing.get_context("spawn"),  # img2dataset runs threads: no fork
        initializer=_die_with_parent,
        max_tasks_per_child=SHARDS_PER_WORKER,
    )


def _die_with_parent() -> None:
    # a worker whose parent was killed would wait for work for ever
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
