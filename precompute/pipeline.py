"""Stages that overlap: each runs ahead of the next by a bounded number of items, and order is kept."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_END = object()
POLL_SECONDS = 0.1


def map_in_order(
    pool: ThreadPoolExecutor, function: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """`map(function, items)` with up to `ahead` calls under way in `pool`."""
    running: deque[Future[Result]] = deque()
    for item in items:
        running.append(pool.submit(function, item))
        if len(running) >= ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def in_background(items: Iterable[Item], ahead: int) -> Generator[Item, None, None]:
    """Iterate over `items` in a thread of its own, up to `ahead` items before the consumer.

    An exception of `items` reaches the consumer in its place; a consumer that stops early stops the thread.
    """
    ready: queue.Queue[Any] = queue.Queue(maxsize=ahead)
    stopped = threading.Event()

    def put(entry: Any) -> bool:
        while not stopped.is_set():
            try:
                ready.put(entry, timeout=POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            for item in items:
                if not put((item, None)):
                    return
            put((_END, None))
        except BaseException as error:  # handed over, and raised by the consumer
            put((_END, error))
        finally:
            if isinstance(items, Generator):  # stops the stages before this one
                items.close()

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        stopped.set()
        thread.join()
