"""Deadlines for calls that may block in an uninterruptible way, such as reads from hung storage."""

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

from shards.base.errors import WorkError, say

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T | None:
    """Call `work` in a daemon thread and return its result, or None if it does not finish in time or raises an error,
    which threading prints. A call that does not finish in time keeps running."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def end_process(message: str) -> NoReturn:
    """Print the error and exit immediately with code 1, without cleanup, because threads may be blocked on storage."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # show the cursor, which a progress bar hides
    say(WorkError(message))
    sys.stdout.flush()
    os._exit(WorkError.exit_code)
