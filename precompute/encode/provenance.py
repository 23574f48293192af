"""That a worker runs its driver's code, and how long each stage takes: for a part's receipt."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

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


class DeviceClock:
    """Seconds in which a device is at work: of a GPU by its own events, else of the calls that do the work."""

    def __init__(self, device: torch.device, stopwatch: Stopwatch):
        self.is_cuda, self.stopwatch = device.type == "cuda", stopwatch
        self.begun: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """What is handed to the device inside counts."""
        if not self.is_cuda:
            with self.stopwatch("device"):
                yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self.begun.append((begin, end))

    def stop(self) -> None:
        """Add up what all batches took, which were waited for."""
        for begin, end in self.begun:
            end.synchronize()
            self.stopwatch.seconds["device"] += begin.elapsed_time(end) / 1000
        self.begun.clear()
