"""Worker processes of this machine, and how a process keeps memory."""

import ctypes
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

MALLOC_OPTIONS = ((-3, 32 << 20), (-1, 1 << 30), (-8, 1))
"""As mallopt(3) numbers them: M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in bytes, M_ARENA_MAX."""


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


def keep_memory() -> None:
    """Have glibc keep what is freed for what comes next, and make no heaps of their own for the threads to come.

    A picture, or a training step on a CPU, takes megabytes, in one thread, and gives them back in another. By default
    they go back to the kernel as well, which takes longer to clear fresh pages than decoding takes to fill them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # other C libraries have none
        for option, value in MALLOC_OPTIONS:
            libc.mallopt(option, value)
