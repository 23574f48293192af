"""Worker processes of this machine."""

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor


def start_pool(
    processes: int, max_tasks_per_child: int | None = None, begin: Callable[[], None] | None = None
) -> ProcessPoolExecutor:
    """Fresh worker processes (no fork: the libraries run threads) that call `begin` first, and end when this one does,
    however it ends."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, context, _begin, (begin,), max_tasks_per_child=max_tasks_per_child)


def _begin(begin: Callable[[], None] | None) -> None:
    # a worker whose parent was killed would wait for work for ever
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if begin:
        begin()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker runs this"
    parent.join()
    os._exit(1)
