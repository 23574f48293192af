"""Being told to leave."""

import signal


class StopSignal:
    """Whether this process was told to leave by SIGTERM or SIGUSR1, as schedulers do before they take a machine.

    It listens from its making on; as a context manager, until it is left.
    """

    def __init__(self, *more: signal.Signals) -> None:
        self.received = False
        numbers = (signal.SIGTERM, signal.SIGUSR1, *more)
        self.before = {number: signal.signal(number, self._receive) for number in numbers}

    def __enter__(self) -> "StopSignal":
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _receive(self, *_: object) -> None:
        self.received = True
