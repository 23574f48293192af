"""The same function over many items, in this process or in several."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, TypeVar

from shards.base.errors import WorkError

Result = TypeVar("Result")


class Workers:
    """Processes that serve one `run` after another; with one process, this one does the work itself."""

    def __init__(self, processes: int):
        self.pool = start_pool(processes) if processes > 1 else None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def run(
        self,
        function: Callable[..., Result],
        calls: Sequence[tuple[Any, ...]],
        done: Callable[[Result], None] = lambda _: None,
    ) -> list[Result]:
        """`function(*call)` for each call; the results in the order of `calls`.

        Args:
            done: told of each result as it comes.

        Raises:
            WorkError: a process died. The first error of `function` is raised as it is.
        """
        if self.pool is None:
            results = []
            for call in calls:
                results.append(function(*call))
                done(results[-1])
            return results
        try:
            futures = [self.pool.submit(function, *call) for call in calls]
            for future in as_completed(futures):
                done(future.result())
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise WorkError(
                "A worker process died (out of memory, or killed). What was finished is kept: run the same command "
                "again, with fewer --processes."
            ) from None


def start_pool(processes: int, max_tasks_per_child: int | None = None) -> ProcessPoolExecutor:
    """Fresh worker processes (no fork: the libraries run threads) that end when this process does, however it ends."""
    return ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), _end_with_parent, max_tasks_per_child=max_tasks_per_child
    )


def _end_with_parent() -> None:
    # a worker whose parent was killed would wait for work for ever
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker runs this"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
