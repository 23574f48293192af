"""The same function over many items, in this process or in several."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from shards.base.errors import WorkError
from shards.base.pool import start_pool


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
