"""Rate limits by in-memory token buckets."""

import time
from collections.abc import Callable

MAX_KEYS = 10_000


class RateLimit:
    """A token bucket per key, which refills at `per_second` up to `burst` tokens."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic):
        self.per_second, self.burst = per_second, burst
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._max_keys = MAX_KEYS

    def wait(self, key: str) -> float:
        """Take a token and return 0, or return the number of seconds until one is available."""
        now = self._clock()
        tokens = self._refilled(key, now)
        granted = tokens >= 1
        self._buckets[key] = (tokens - granted, now)
        if len(self._buckets) > self._max_keys:  # a full bucket behaves like a missing one
            self._buckets = {key: self._buckets[key] for key in self._buckets if self._refilled(key, now) < self.burst}
            self._max_keys = max(MAX_KEYS, 2 * len(self._buckets))
        return 0.0 if granted else (1 - tokens) / self.per_second

    def _refilled(self, key: str, now: float) -> float:
        """Return the tokens in a key's bucket at time `now`."""
        tokens, then = self._buckets.get(key, (self.burst, now))
        return min(self.burst, tokens + (now - then) * self.per_second)
