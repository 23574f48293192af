"""Worker processes on this machine, and the memory allocator's settings."""

import ctypes
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

MALLOC_OPTIONS = ((-3, 32 << 20), (-1, 1 << 30), (-8, 1))
"""mallopt(3) parameters: M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in bytes, and M_ARENA_MAX."""


def start_pool(
    processes: int, max_tasks_per_child: int | None = None, initializer: Callable[[], None] | None = None
) -> ProcessPoolExecutor:
    """Start a pool of spawned worker processes that run `initializer` first and exit when this process does.

    Workers are spawned, because forking is unsafe in a process whose libraries run threads.
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, context, _initialize, (initializer,), max_tasks_per_child=max_tasks_per_child)


def _initialize(initializer: Callable[[], None] | None) -> None:
    # otherwise a worker whose parent was killed would wait for work forever
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if initializer:
        initializer()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs only in workers"
    parent.join()
    os._exit(1)


def configure_malloc() -> None:
    """Make glibc retain freed memory for reuse, and share one arena among all threads.

    Decoding a picture, like a training step on a CPU, allocates megabytes in one thread and frees them in another. By
    default, glibc returns that memory to the kernel, and clearing fresh pages takes longer than decoding takes to fill
    them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # other C libraries lack mallopt
        for option, value in MALLOC_OPTIONS:
            libc.mallopt(option, value)
