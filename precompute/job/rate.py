"""A job's current rate and remaining time, measured over a window because clusters grow and shrink."""

import time
from collections import deque

WINDOW_SECONDS = 100.0
STEP_SECONDS = 1.0


class Rate:
    """Growth of a count per second over the last WINDOW_SECONDS."""

    def __init__(self) -> None:
        self.points: deque[tuple[float, float]] = deque([(time.monotonic(), 0.0)])
        """(time, count), at most one per STEP_SECONDS."""

    def add(self, count: float) -> None:
        """Record the current count. Calls in quick succession are ignored."""
        now = time.monotonic()
        if now - self.points[-1][0] >= STEP_SECONDS:
            self.points.append((now, count))
        while len(self.points) > 2 and now - self.points[1][0] >= WINDOW_SECONDS:
            self.points.popleft()

    @property
    def per_second(self) -> float:
        """Rate, never negative. The count drops when an attempt is lost, because its progress no longer counts."""
        (began, before), (now, count) = self.points[0], self.points[-1]
        return max(0.0, count - before) / (now - began) if now > began else 0.0


def eta(total: int, finished: int, mean: float, under_way: float, rate: float) -> float | None:
    """Estimate the seconds until `total` tars are finished; None if there is nothing to estimate from.

    Args:
        mean: samples per tar.
        under_way: samples processed from unfinished tars.
        rate: samples per second.
    """
    if finished == total:
        return 0.0
    if not mean or not rate:
        return None
    return max(0.0, (total - finished) * mean - under_way) / rate
