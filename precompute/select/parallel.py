"""Map a function over many items, in this process or in a process pool."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from shards.base.errors import WorkError
from shards.base.pool import start_pool


@contextmanager
def workers(processes: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Provide `run(function, calls)`, which yields `function(*call)` for each call in order.

    With `processes` = 1, the calls run in this process.

    Raises:
        WorkError: A worker process died. An exception raised by `function` propagates unchanged.
    """
    if processes == 1:
        yield itertools.starmap
        return
    pool = start_pool(processes)
    try:
        yield lambda function, calls: pool.map(function, *zip(*calls, strict=True))
    except BrokenProcessPool:
        raise WorkError(
            "A worker process died (out of memory, or killed). Finished work is kept. Run the same command again "
            "with fewer --processes."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
