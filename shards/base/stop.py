"""Being told to leave."""

import signal
import sys
from typing import NoReturn, Self

from shards.base.errors import Preempted, say


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

    def _receive(self, *_: object) -> None:
        self.received = True


class StopSignal(Heard):
    """Whether this process was told to leave by SIGTERM or SIGUSR1, as schedulers do before they take a machine."""

    def __init__(self, *more: signal.Signals) -> None:
        super().__init__(signal.SIGTERM, signal.SIGUSR1, *more)


def leave_when_told(message: str) -> None:
    """From now on SIGTERM and SIGUSR1 end the process with `message` and Preempted's code, whatever it is at.

    By SystemExit: Preempted itself would be taken for an error of the store, or of the cluster, that it interrupts.
    """

    def leave(*_: object) -> NoReturn:
        say(Preempted(message))
        sys.exit(Preempted.exit_code)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, leave)
