"""Overlapping stages: each stage runs ahead of the next by a bounded number of items, and items stay in order."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import chain, islice
from typing import TypeVar

from shards.base.errors import Stuck

Item = TypeVar("Item")
Result = TypeVar("Result")


class Pool(ThreadPoolExecutor):
    """Thread pool with a `closing` event, which running calls check in order to stop early."""

    def __init__(self, number: int):
        super().__init__(number)
        self.closing = threading.Event()
        """Set once nothing waits for results anymore."""


@contextmanager
def threads(number: int, seconds: float | None = None) -> Iterator[Pool]:
    """Provide a thread pool, and wait for its calls on exit. The wait takes at most `seconds` after an exception, and
    is skipped after `Stuck`.

    Raises:
        Stuck: another exception was raised, and one of the calls did not end within `seconds` afterwards.
    """
    pool = Pool(number)
    try:
        yield pool
    except BaseException as error:
        pool.closing.set()
        # in a thread, because `shutdown` has no timeout
        closer = threading.Thread(target=pool.shutdown, kwargs={"cancel_futures": True}, daemon=True)
        closer.start()
        is_stuck = isinstance(error, Stuck)
        closer.join(0 if is_stuck else seconds)
        if closer.is_alive() and not is_stuck:
            raise Stuck(
                f"a call did not finish within {seconds} s after another call failed with {type(error).__name__}: "
                f"{error}"
            ) from error
        raise
    pool.shutdown()


def map_in_order(
    pool: Pool,
    function: Callable[[Item], Result],
    items: Iterable[Item],
    ahead: int,
    seconds: float | None = None,
    in_a_row: int = 1,
) -> Iterator[Result]:
    """Yield `function(item)` for each of `items`, in order, with up to `ahead` calls in flight in `pool`.

    Args:
        in_a_row: number of calls submitted to a thread together, because submitting a call takes as long as decoding a
            small image.

    Raises:
        Stuck: the call whose result is next did not end within `seconds`. This is detected within twice that time.
    """

    def call_each(group: list[Item], finished: list[Result]) -> None:
        for item in group:
            if pool.closing.is_set():
                raise CancelledError
            finished.append(function(item))

    def results(call: Future[None], finished: list[Result]) -> list[Result]:
        while True:
            num_finished = len(finished)
            try:
                call.exception(seconds)
            except TimeoutError:
                if len(finished) == num_finished:
                    raise Stuck(f"a call timed out after {seconds} s and cannot be interrupted") from None
            else:
                call.result()
                return finished

    left, running = iter(items), deque[tuple[Future[None], list[Result]]]()
    while group := list(islice(left, in_a_row)):
        finished: list[Result] = []
        running.append((pool.submit(call_each, group, finished), finished))
        if len(running) * in_a_row >= ahead:
            yield from results(*running.popleft())
    while running:
        yield from results(*running.popleft())


class Turns:
    """Resources shared by the tars that a process works on.

    One tar uses the device while the next one prepares its first batches and others are being committed. Therefore, at
    most two tars' images are in memory, however many tars are in flight.
    """

    def __init__(self) -> None:
        self.pictures = threading.BoundedSemaphore(2)
        self.device, self.empty_caption = threading.Lock(), threading.Lock()
        self.lapped = time.monotonic()

    @contextmanager
    def at_device(self, items: Generator[Item, None, None]) -> Iterator[Iterator[Item]]:
        """Provide an iterator over `items` while holding the device, and close `items` on exit. The first item is
        produced before the wait for the device."""
        with closing(items):
            first = list(islice(items, 1))
            with self.device:
                yield chain(first, items)

    def lap(self) -> float:
        """Return the seconds since the last call, or since the process started."""
        before, self.lapped = self.lapped, time.monotonic()
        return self.lapped - before
