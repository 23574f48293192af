"""The same function over many items, in this process or in several."""

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from shards.base.errors import WorkError


@contextmanager
def workers(processes: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """`run(function, calls)` gives `function(*call)` for each call, in order; with one process, in this one.

    Raises:
        WorkError: a process died. The first error of `function` is raised as it is.
    """
    if processes == 1:
        yield itertools.starmap
        return
    pool = start_pool(processes)
    try:
        yield lambda function, calls: pool.map(function, *zip(*calls, strict=True))
    except BrokenProcessPool:
        raise WorkError(
            "A worker process died (out of memory, or killed). What was finished is kept: run the same command "
            "again, with fewer --processes."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


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
