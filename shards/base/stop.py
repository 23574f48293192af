"""Stop signals from schedulers and from the terminal."""

import signal
import sys
from typing import NoReturn, Self

from shards.base.errors import Preempted, say

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class SignalFlag:
    """Flag that is set once this process receives one of the given signals. Leaving its `with` block restores the
    previous handlers."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self.received = False
        self.before = {number: signal.signal(number, self._receive) for number in numbers}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, *_: object) -> None:
        self.received = True
        if number == signal.SIGINT:  # a second Ctrl-C ends the process immediately
            signal.signal(signal.SIGINT, signal.SIG_DFL)


class StopSignal(SignalFlag):
    """Flag for stop requests: SIGTERM and SIGUSR1, which schedulers send, and SIGINT, which Ctrl-C sends."""

    def __init__(self) -> None:
        super().__init__(*STOP_SIGNALS)


def exit_on_stop_signal(message: str) -> None:
    """Make SIGTERM, SIGUSR1 and SIGINT end the process immediately, with `message` and the exit code of `Preempted`.

    The handler raises SystemExit, because code interrupted in a store or cluster call would mistake `Preempted` for an
    error of that call.
    """

    def exit_now(*_: object) -> NoReturn:
        say(Preempted(message))
        sys.exit(Preempted.exit_code)

    for number in STOP_SIGNALS:
        signal.signal(number, exit_now)
