"""How often one may ask: token buckets, in memory."""

import time
from collections.abc import Callable

MOST_KEPT = 10_000


class Limit:
    """So many a second for each key, and so many at once."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic):
        self.per_second, self.burst = per_second, burst
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}
        self._most = MOST_KEPT

    def wait(self, key: str) -> float:
        """Take one; returns 0, or the seconds until there is one to take."""
        now = self._clock()
        left = self._refilled(key, now)
        taken = left >= 1
        self._left[key] = (left - taken, now)
        if len(self._left) > self._most:  # who has not asked for a while is as one who never did
            self._left = {key: self._left[key] for key in self._left if self._refilled(key, now) < self.burst}
            self._most = max(MOST_KEPT, 2 * len(self._left))
        return 0.0 if taken else (1 - left) / self.per_second

    def _refilled(self, key: str, now: float) -> float:
        left, then = self._left.get(key, (self.burst, now))
        return min(self.burst, left + (now - then) * self.per_second)
