"""Being told to leave."""

import signal
import sys
from typing import NoReturn, Self

from shards.base.errors import Preempted, say

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Heard:
    """Whether this process got one of some signals. It listens from its making on; as a context manager, until left."""

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
        if number == signal.SIGINT:  # a second Ctrl-C ends the process at once
            signal.signal(signal.SIGINT, signal.SIG_DFL)


class StopSignal(Heard):
    """Whether this process received SIGTERM or SIGUSR1, which schedulers send, or SIGINT, which Ctrl-C sends."""

    def __init__(self) -> None:
        super().__init__(*STOP_SIGNALS)


def leave_when_told(message: str) -> None:
    """From now on SIGTERM, SIGUSR1 and SIGINT end the process with `message` and Preempted's code, whatever it is at.

    By SystemExit: Preempted itself would be taken for an error of the store, or of the cluster, that it interrupts.
    """

    def leave(*_: object) -> NoReturn:
        say(Preempted(message))
        sys.exit(Preempted.exit_code)

    for number in STOP_SIGNALS:
        signal.signal(number, leave)
