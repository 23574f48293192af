"""The same function over many items, in this process or in several."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from shards.errors import WorkError

Result = TypeVar("Result")


def run_all(
    function: Callable[..., Result], calls: Sequence[tuple[Any, ...]], processes: int, done: Callable[[Result], None]
) -> list[Result]:
    """`function(*call)` for each call; the results in the order of `calls`.

    Args:
        done: told of each result as it comes.

    Raises:
        WorkError: a process died. The first error of `function` is raised as it is; calls not begun are given up.
    """
    if min(processes, len(calls)) <= 1:
        results = []
        for call in calls:
            results.append(function(*call))
            done(results[-1])
        return results
    with ProcessPoolExecutor(min(processes, len(calls)), multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(function, *call) for call in calls]
        try:
            for future in as_completed(futures):
                done(future.result())
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise WorkError(
                "A worker process died (out of memory, or killed). What was finished is kept: run the same command "
                "again, with fewer --processes."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)
