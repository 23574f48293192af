"""Termination of a process that blocks too long in an uninterruptible call, such as a read from hung storage."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

from shards.base.errors import WorkError, say

DIAGNOSIS_SECONDS = 10.0

T = TypeVar("T")


class Watchdog:
    """A background thread that enforces a deadline while the process is inside `watching`."""

    def __init__(self, explain: Callable[[], str]):
        """
        Args:
            explain: returns a probable cause for the error message. If it hangs as well, the message omits the cause.
        """
        self.explain = explain
        self.seconds = 0.0
        self.deadline: float | None = None
        self.changed = threading.Condition()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    @contextmanager
    def watching(self, seconds: float) -> Iterator[None]:
        """Terminate the process with exit code 1 and an error message if the body takes longer than `seconds`."""
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
        end_process(f"No batch arrived within {self.seconds:g} s. {diagnose(self.explain) or ''}".rstrip())


def diagnose(explain: Callable[[], T]) -> T | None:
    """Return the result of `explain`, or None if it does not finish within DIAGNOSIS_SECONDS."""
    found: list[T] = []
    diagnosis = threading.Thread(target=lambda: found.append(explain()), daemon=True)
    diagnosis.start()
    diagnosis.join(DIAGNOSIS_SECONDS)
    return found[0] if found else None


def end_process(message: str) -> NoReturn:
    """Print the error and exit immediately with code 1, without cleanup, because threads may be blocked on storage."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # show the cursor, which a progress bar hides
    say(WorkError(message))
    sys.stdout.flush()
    os._exit(WorkError.exit_code)
