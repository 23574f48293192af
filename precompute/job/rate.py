"""How fast a job goes now, and so when it ends: over a window, as a cluster grows and shrinks while it works."""

import time
from collections import deque

WINDOW_SECONDS = 100.0
STEP_SECONDS = 1.0


class Rate:
    """The growth per second of a count, over the last WINDOW_SECONDS."""

    def __init__(self) -> None:
        self.points: deque[tuple[float, float]] = deque([(time.monotonic(), 0.0)])

    def add(self, count: float) -> None:
        """The count now; taken about once a second, however often it is given."""
        now = time.monotonic()
        if now - self.points[-1][0] >= STEP_SECONDS:
            self.points.append((now, count))
        while len(self.points) > 2 and now - self.points[1][0] >= WINDOW_SECONDS:
            self.points.popleft()

    @property
    def per_second(self) -> float:
        """0 where nothing grew; what lost attempts had done goes, and may outweigh what else was done."""
        (began, before), (now, count) = self.points[0], self.points[-1]
        return max(0.0, count - before) / (now - began) if now > began else 0.0


def eta(total: int, finished: int, mean: float, under_way: float, rate: float) -> float | None:
    """Seconds until `total` tars are finished, at `rate` samples/s; None where nothing says.

    `mean` samples to a tar, of which `under_way` were taken in of tars that are not `finished`.
    """
    if finished == total:
        return 0.0
    if not mean or not rate:
        return None
    return max(0.0, (total - finished) * mean - under_way) / rate
