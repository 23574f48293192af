"""Ends a process that waits too long for what cannot be interrupted, such as a read from storage that stalls."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shards.errors import WorkError, say

DIAGNOSIS_SECONDS = 10.0


class Watchdog:
    """One thread; it looks on only within `watching`."""

    def __init__(self, seconds: float, explain: Callable[[], str]):
        """`explain`: what may be wrong; it may itself stall, and is then left out."""
        self.seconds = seconds
        self.explain = explain
        self.deadline: float | None = None
        self.changed = threading.Condition()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """If the body takes longer than `seconds`, the process ends with exit code 1 and says why."""
        with self.changed:
            self.deadline = time.monotonic() + self.seconds
            self.changed.notify()
        try:
            yield
        finally:
            with self.changed:
                self.deadline = None

    def _watch(self) -> None:
        with self.changed:
            while True:
                left = None if self.deadline is None else self.deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self.changed.wait(left)
        found = [""]
        diagnosis = threading.Thread(target=lambda: found.__setitem__(0, self.explain()), daemon=True)
        diagnosis.start()
        diagnosis.join(DIAGNOSIS_SECONDS)
        say(WorkError(f"No batch came in {self.seconds:g} s. {found[0]}".rstrip()))
        sys.stdout.flush()
        # the thread that waits cannot be interrupted, and nothing that it holds can be put in order
        os._exit(WorkError.exit_code)
