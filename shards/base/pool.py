"""Local worker processes and threads, and memory allocator settings."""

import ctypes
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

POLL_SECONDS = 0.5
MALLOC_OPTIONS = ((-3, 32 << 20), (-1, 1 << 30), (-8, 1))
"""mallopt(3) parameters: M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in bytes, and M_ARENA_MAX."""
PR_SET_PDEATHSIG = 1
"""`prctl` option that selects the signal to send to a process when its parent dies."""


def start_pool(
    processes: int, max_tasks_per_child: int | None = None, initializer: Callable[[], None] | None = None
) -> ProcessPoolExecutor:
    """Start a pool of spawned worker processes that run `initializer` first and exit when this process does.

    Workers are spawned, because forking is unsafe in a process whose libraries run threads.
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, context, _initialize, (initializer,), max_tasks_per_child=max_tasks_per_child)


def run_each(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    processes: int,
    *,
    max_tasks_per_child: int | None = None,
    initializer: Callable[[], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Generator[tuple[Item, Future[Result]], None, None]:
    """Call `function` on each item in worker processes, and yield (item, finished future) in order of completion.

    A worker that dies, for example because the machine ran out of memory, breaks its whole pool. At most `processes`
    calls are submitted at a time, so only those few fail, with BrokenProcessPool in their futures. A new pool runs the
    remaining items.

    Workers that are still busy when the iterator ends early or is closed are terminated, so `function` must tolerate
    being killed at any point.

    Args:
        should_stop: polled twice a second; the iterator ends early once it returns True.
    """
    waiting = deque(items)
    other_children = set(multiprocessing.active_children())
    while waiting and not should_stop():
        running: dict[Future[Result], Item] = {}
        is_broken = False
        with start_pool(min(processes, len(waiting)), max_tasks_per_child, initializer) as pool:
            try:
                while not should_stop():
                    while waiting and not is_broken and len(running) < processes:
                        try:
                            running[pool.submit(function, waiting[0])] = waiting[0]
                            waiting.popleft()
                        except BrokenProcessPool:  # a worker died since the last wait
                            is_broken = True
                    if not running:
                        break
                    for future in wait(running, POLL_SECONDS, FIRST_COMPLETED).done:
                        is_broken |= isinstance(future.exception(), BrokenProcessPool)
                        yield running.pop(future), future
            finally:
                if running:
                    for process in set(multiprocessing.active_children()) - other_children:
                        process.terminate()


def in_background(items: Iterable[Item], ahead: int) -> Generator[Item, None, None]:
    """Iterate over `items` in a separate thread, which stays up to `ahead` items ahead of the consumer.

    If `items` raises an exception, it is raised in the consumer after the preceding items. If the consumer stops early,
    so does the thread.
    """
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1) as thread:
        # one item is being produced while `ahead` finished items wait
        calls = deque(thread.submit(next, iterator, end) for _ in range(ahead + 1))
        try:
            while (item := calls.popleft().result()) is not end:
                calls.append(thread.submit(next, iterator, end))
                yield item  # type: ignore[misc]
        finally:
            for call in calls:
                call.cancel()
            thread.shutdown()
            if isinstance(items, Generator):  # stops the stages before this one
                items.close()


def _initialize(initializer: Callable[[], None] | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends SIGINT to all processes; the parent handles it
    # otherwise a worker whose parent was killed would wait for work forever
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if initializer:
        initializer()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs only in workers"
    parent.join()
    os._exit(1)


def die_with(parent: int) -> bool:
    """Ask the kernel to kill this process when process `parent`, its parent, dies, even by SIGKILL (Linux only).

    The kernel already does so when the thread that started this process ends, so that thread must outlive it.

    Returns:
        Whether the parent is still alive. If it died before the request, the kernel will not kill this process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent


def configure_malloc() -> None:
    """Make glibc retain freed memory for reuse, and share one arena among all threads.

    Decoding an image, like a training step on a CPU, allocates megabytes in one thread and frees them in another. By
    default, glibc returns that memory to the kernel, which then takes longer to clear fresh pages than decoding takes
    to fill them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # other C libraries lack mallopt
        for option, value in MALLOC_OPTIONS:
            libc.mallopt(option, value)
