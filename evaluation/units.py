"""Units of work on Ray, for sampling and feature extraction."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch

from cluster.actor import Function
from cluster.failure_log import summarize
from cluster.fleet import Done, Failed, Fleet, FleetConfig, News, UnderWay
from cluster.pool import WorkerPool
from cluster.start import start_ray
from shards.base.device import is_accelerator, worker_device
from shards.base.errors import Preempted, WorkError
from shards.base.progress import Progress

Work = TypeVar("Work")
Model = TypeVar("Model")

_kept_workers: ContextVar[dict[str, WorkerPool[Any, Any]] | None] = ContextVar("kept workers", default=None)
_caches: list[Any] = []
"""The caches that `keep_last` has created in this process."""
_last_kind: object = None
"""The function of the units that this worker ran last."""


@contextmanager
def workers_kept() -> Iterator[None]:
    """Let all jobs in this context share their workers. Otherwise, each job would start its own, which takes seconds
    because every worker imports torch."""
    if _kept_workers.get() is not None:
        yield
        return
    pools: dict[str, WorkerPool[Any, Any]] = {}
    token = _kept_workers.set(pools)
    try:
        yield
    finally:
        _kept_workers.reset(token)
        for pool in pools.values():
            pool.drain()


def keep_last(load: Callable[..., Model]) -> Callable[..., Model]:
    """Let a worker keep the last model that `load` returned until it runs units of a different kind."""
    cached = lru_cache(maxsize=1)(load)
    _caches.append(cached)
    return cached


def run_units(
    units: Sequence[tuple[str, Work]], function: Function[Work, Any], workers: FleetConfig, what: str
) -> None:
    """Apply `function` to every unit (key, work) on Ray workers. Ray is started only if there are any units.

    Raises:
        Preempted: the job was stopped before it finished.
        WorkError: some units failed, or no node in the cluster can host a worker.
    """
    if not units:
        return
    start_ray(workers)
    pool = None
    if (pools := _kept_workers.get()) is not None:
        key = workers.model_dump_json()
        if key not in pools:
            pools[key] = WorkerPool(workers)
        pool = pools[key]
    failed: dict[str, str] = {}
    done, total = 0, len(units)
    # random order, so that two jobs that run at once on the same parts duplicate only the units in flight
    order = random.sample(units, total)
    with Progress(what, "parts", total) as progress:
        for event in Fleet(workers, partial(run_on_worker, function, workers), iter(order), pool=pool):
            match event:
                case Done():
                    done += 1
                case Failed(key=key, which=which, failure=failure, again=again):
                    is_final = "" if again else ", giving up on the part"
                    progress.say(f"{what} {key}: {which}{is_final}: {failure.text}")
                    if not again:
                        failed[key] = failure.line
                case News(text=text):
                    progress.say(text)
                case UnderWay(attempts=attempts, reported=reported):
                    if progress.is_due:
                        figures = {"done": done, "parts": total, "under_way": attempts, "pictures": reported}
                        progress.show(done + len(failed), f"images in progress: {reported}", figures)
    if failed:
        reasons = summarize(list(failed.items()), most=len(failed))
        raise WorkError(
            f"{what}: {len(failed)} of {total} parts failed ({reasons}). All others are committed. Run the same "
            f"command again to retry only the failed ones."
        )
    if done < total:
        raise Preempted(
            f"{what}: a signal stopped the job with {total - done} of {total} parts remaining. Run the same command "
            f"again to continue."
        )


def run_on_worker(
    function: Function[Work, Any], config: FleetConfig, work: Work, attempt: int, report: Callable[[int], None]
) -> Any:
    """Make one attempt at a unit. If the previous unit was of a different kind, free its models first."""
    global _last_kind
    torch.set_num_threads(1 if is_accelerator(worker_device(config.num_gpus)) else max(1, int(config.num_cpus)))
    if (kind := getattr(function, "func", function)) is not _last_kind:
        _last_kind = kind
        for cache in _caches:
            cache.cache_clear()  # free the memory of the previous job's models
    return function(work, attempt, report)
