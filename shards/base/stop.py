"""Stop signals from schedulers and from the terminal."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, NoReturn, Self

from shards.base.errors import Preempted, discard_unread_output, say

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class SignalFlag:
    """Flag that is set once this process receives one of the given signals. Leaving its `with` block restores the
    previous handlers.

    `with` blocks can be nested: a signal sets all flags for it, and a new flag is set if an outer one has received a
    signal that it is for.
    """

    opened: ClassVar[list["SignalFlag"]] = []
    """Flags whose `with` blocks are open, outermost first."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self.received = False
        handled = [number for number in numbers if not is_ignored(number)]
        self.before = {number: signal.signal(number, self._receive) for number in handled}
        if any(flag.received and flag.before.keys() & self.before.keys() for flag in self.opened):
            self.received = True

    def __enter__(self) -> Self:
        self.opened.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.remove(self)
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, *_: object) -> None:
        for flag in (self, *self.opened):
            flag.received |= number in flag.before
        if number == signal.SIGINT:  # a second Ctrl-C ends the process immediately
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        discard_unread_output()  # if the terminal was closed; the signal may have been passed on by a launcher


class StopSignal(SignalFlag):
    """Flag for stop requests: SIGTERM and SIGUSR1, which schedulers send, SIGINT, which Ctrl-C sends, and SIGHUP, which
    a closed terminal sends."""

    def __init__(self) -> None:
        super().__init__(*STOP_SIGNALS)


def exit_on_stop_signal(message: str) -> None:
    """Make the stop signals end the process immediately, with `message` and the exit code of `Preempted`.

    The handler raises SystemExit, because code interrupted in a store or cluster call would mistake `Preempted` for an
    error of that call.
    """

    def exit_now(*_: object) -> NoReturn:
        say(Preempted(message))
        sys.exit(Preempted.exit_code)

    for number in STOP_SIGNALS:
        if not is_ignored(number):
            signal.signal(number, exit_now)


@contextmanager
def exiting_on_stop_signal(message: str) -> Iterator[None]:
    """Make the stop signals end the process, like `exit_on_stop_signal`, but only while the block runs. Use it around
    long work that never looks at a flag."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    exit_on_stop_signal(message)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_ignored(number: signal.Signals) -> bool:
    """Return whether the signal is SIGHUP in a process that `nohup` started, which continues without its terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
