"""Stages that overlap: each runs ahead of the next by a bounded number of items, and order is kept."""

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from itertools import chain, islice
from typing import Any, Generic, TypeVar

from shards.base.errors import WorkError

Item = TypeVar("Item")
Result = TypeVar("Result")

_END = object()
POLL_SECONDS = 0.1


class Later(Generic[Result]):
    """A value that is waited for when it is first asked for; what it took to get it is let go of then."""

    def __init__(self, wait: Callable[[], Result]):
        self._wait: Callable[[], Result] | None = wait

    def __call__(self) -> Result:
        if self._wait is not None:
            self._value, self._wait = self._wait(), None
        return self._value


class Stuck(WorkError):
    """A call in a thread did not end. Nothing can end it, so the process that it is in has to go."""


class Pool(ThreadPoolExecutor):
    """Threads that know which calls they were given."""

    def __init__(self, number: int):
        super().__init__(number)
        self.lock = threading.Lock()
        self.left = threading.Event()
        """Nobody waits for results any more."""
        self.calls: weakref.WeakSet[Future[Any]] = weakref.WeakSet()

    def submit(self, function: Callable[..., Result], /, *args: Any, **options: Any) -> Future[Result]:
        """As `ThreadPoolExecutor`."""
        with self.lock:
            future = super().submit(function, *args, **options)
            self.calls.add(future)
        return future

    def ends(self, seconds: float | None) -> bool:
        """Take no more calls, cancel those that wait, and see whether the others end in `seconds`."""
        self.left.set()
        self.shutdown(wait=False, cancel_futures=True)
        with self.lock:
            running = [call for call in self.calls if not call.done()]
        return not wait(running, seconds).not_done


@contextmanager
def threads(number: int, seconds: float | None = None) -> Iterator[Pool]:
    """A pool that is waited for on leaving; after an exception for at most `seconds`, and after `Stuck` not at all.

    Raises:
        Stuck: there was another exception, and one of the calls did not end.
    """
    pool = Pool(number)
    try:
        yield pool
    except Stuck:
        pool.left.set()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    except BaseException as error:
        if not pool.ends(seconds):
            raise Stuck(f"a call took more than {seconds} s, after {type(error).__name__}: {error}") from error
        raise
    pool.shutdown()


class Row(Generic[Item, Result]):
    """Calls that a thread of a pool makes one after the other, until nobody waits for results any more."""

    def __init__(self, pool: Pool, function: Callable[[Item], Result], items: list[Item]):
        self.pool, self.function, self.items = pool, function, items
        self.made: list[Result] = []
        self.future = pool.submit(self._make)

    def results(self, seconds: float | None) -> list[Result]:
        """Wait for them, in order.

        Raises:
            Stuck: a call did not end in `seconds`; it is found in less than twice as many.
        """
        while True:
            made = len(self.made)
            try:
                self.future.exception(seconds)
            except TimeoutError:
                if len(self.made) == made:
                    raise Stuck(f"a call took more than {seconds} s") from None
            else:
                self.future.result()
                return self.made

    def _make(self) -> None:
        for item in self.items:
            if self.pool.left.is_set():
                raise CancelledError
            self.made.append(self.function(item))


def map_in_order(
    pool: Pool,
    function: Callable[[Item], Result],
    items: Iterable[Item],
    ahead: int,
    seconds: float | None = None,
    together: int = 1,
) -> Iterator[Result]:
    """`map(function, items)` with up to `ahead` calls under way in `pool`.

    Args:
        together: calls that a thread makes in a row; to hand it one takes as long as to decode a small picture.

    Raises:
        Stuck: a call whose result is next did not end in `seconds`.
    """
    left, running = iter(items), deque[Row[Item, Result]]()
    while some := list(islice(left, together)):
        running.append(Row(pool, function, some))
        if len(running) * together >= ahead:
            yield from running.popleft().results(seconds)
    while running:
        yield from running.popleft().results(seconds)


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
            try:  # an interrupt of this thread is raised between two looks
                item, error = ready.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        stopped.set()
        thread.join()


class Turns:
    """What the tars that a process has in hand at once take turns at.

    One is at the device, the next one has its first batches ready, and others are being committed: so the memory for
    pictures is that of two, however many there are.
    """

    def __init__(self) -> None:
        self.pictures = threading.BoundedSemaphore(2)
        self.device, self.empty_caption = threading.Lock(), threading.Lock()
        self.lapped = time.monotonic()

    @contextmanager
    def at_device(self, items: Generator[Item, None, None]) -> Iterator[Iterator[Item]]:
        """`items`: the first is made before the device is waited for, which then is this one's to the end."""
        with closing(items):
            first = list(islice(items, 1))
            with self.device:
                yield chain(first, items)

    def lap(self) -> float:
        """Seconds since the last call, or since the process began with this."""
        before, self.lapped = self.lapped, time.monotonic()
        return self.lapped - before
