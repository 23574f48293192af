"""That a worker runs its driver's code, and how long each stage takes: for a part's receipt."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from shards.base.errors import UnfitNode
from shards.root.provenance import source_sha256

Item = TypeVar("Item")
Result = TypeVar("Result")


def check_source(drivers: str) -> None:
    """See that this process runs the driver's code.

    Raises:
        UnfitNode: it does not, and what it made could not be told from what the driver's code makes.
    """
    if source_sha256() != drivers:
        raise UnfitNode(
            f"The node {os.uname().nodename} runs another version of this program: its source has the SHA-256 "
            f"{source_sha256()}, the driver's {drivers}. Nothing was encoded there. Bring it to the driver's version, "
            f"or take it out of the cluster."
        )


class Stopwatch:
    """Seconds by stage, added up over whatever threads work on it."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seconds: Counter[str] = Counter()
        self.lock = threading.Lock()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            with self.lock:
                self.seconds[stage] += time.monotonic() - began  # type: ignore[assignment]

    def timed(self, stage: str, function: Callable[..., Result]) -> Callable[..., Result]:
        """`function`, whose calls count."""

        def counted(*arguments: object, **options: object) -> Result:
            with self(stage):
                return function(*arguments, **options)

        return counted

    def waiting(self, stage: str, items: Iterable[Item]) -> Iterator[Item]:
        """`items`; the wait for each counts."""
        iterator = iter(items)
        while True:
            try:
                with self(stage):
                    item = next(iterator)
            except StopIteration:
                return
            yield item
