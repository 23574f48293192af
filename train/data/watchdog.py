"""Ends a process that waits too long for what cannot be interrupted, such as a read from storage that stalls."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from shards.base.errors import WorkError, say

DIAGNOSIS_SECONDS = 10.0


class Watchdog:
    """One thread; it looks on only within `watching`."""

    def __init__(self, explain: Callable[[], str]):
        """`explain`: what may be wrong; it may itself stall, and is then left out."""
        self.explain = explain
        self.seconds = 0.0
        self.deadline: float | None = None
        self.changed = threading.Condition()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    @contextmanager
    def watching(self, seconds: float) -> Iterator[None]:
        """If the body takes longer than `seconds`, the process ends with exit code 1 and says why."""
        with self.changed:
            self.seconds, self.deadline = seconds, time.monotonic() + seconds
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
        end_process(f"No batch came in {self.seconds:g} s. {diagnose(self.explain) or ''}".rstrip())


def diagnose(explain: Callable[[], str]) -> str | None:
    """What `explain` says; None where it too stalls."""
    found: list[str] = []
    diagnosis = threading.Thread(target=lambda: found.append(explain()), daemon=True)
    diagnosis.start()
    diagnosis.join(DIAGNOSIS_SECONDS)
    return found[0] if found else None


def end_process(message: str) -> NoReturn:
    """Say why, and end with exit code 1 at once: what waits for storage cannot be interrupted or put in order."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # the cursor, which a bar hides
    say(WorkError(message))
    sys.stdout.flush()
    os._exit(WorkError.exit_code)
