"""Circuit breaker: while storage, credentials, models or the cluster are unavailable, the job pauses and does not use
up attempts. During a pause, one attempt at a time probes whether the outage is over, with growing delays in between.
Pure logic, without Ray.
"""

import math
import time
from collections.abc import Collection, Iterable

from pydantic import Field

from cluster.retry import backoff
from shards.base.config import Config
from shards.base.errors import Outage, WorkError

FIRST_PAUSE_SECONDS = 5.0
UNFIT_PROBES = 4
"""Number of consecutive probes after which the job gives up if they all fail for a reason that waiting cannot fix, such
as a missing model. The last of these probes comes 35 s after the first."""


class OutageConfig(Config):
    """Conditions under which a job stops because of an outage."""

    outage_probes: int = Field(16, ge=1)
    """Number of consecutive attempts that may fail because of storage, credentials or the cluster before the job stops.
    Each attempt tries a different unit of work if possible. The delays between attempts grow to five minutes and add up
    to 50 minutes."""


class Breaker:
    """Circuit breaker that decides whether the job is paused and when it probes. It is open while the job is paused."""

    def __init__(self, config: OutageConfig):
        self.most = config.outage_probes
        self.last_success = -math.inf
        """Start time of the most recently started attempt that succeeded."""
        self.last_outage = -math.inf
        """Time at which an attempt last failed because of an outage."""
        self.affected: set[str] = set()
        """Keys of the units that hit the outage."""
        self.failing: set[str] = set()
        """Nodes where an outage has ended an attempt since the last success there."""
        self.probed: list[str] = []
        """Keys of the units whose attempts opened the breaker and kept it open, whatever the cause."""
        self.unfit = 0
        """Number of consecutive probes so far that failed for a reason that waiting cannot fix."""
        self.paused_at = self.next_probe = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the job is paused."""
        return bool(self.probed)

    def allowed(self, room: int, began: Iterable[float]) -> int:
        """Return how many attempts may start now: up to `room`, or during a pause, one probe at a time once it is due.
        `began` holds the start times of the running attempts."""
        if not self.is_open:
            return room
        is_due = time.monotonic() >= self.next_probe and not any(map(self._is_probe, began))
        return min(room, int(is_due))

    def _is_probe(self, began: float) -> bool:
        return self.is_open and began > self.paused_at

    def record_success(self, node: str | None, began: float) -> str | None:
        """Record an attempt that succeeded. Return a message for the user, or None if there is nothing to report."""
        self.last_success = max(self.last_success, began)
        self.failing.discard(node or "")
        was_open = self.is_open
        if began <= (self.paused_at if was_open else self.last_outage):
            return None  # the attempt may have fetched everything it needed before the outage
        self.probed = []
        self.unfit = 0
        self.affected.clear()
        if not was_open:
            return None
        self.failing.clear()
        return f"The outage is over. The job is resuming after a pause of {time.monotonic() - self.paused_at:.0f} s."

    def record_outage(
        self, key: str, node: str | None, able: Collection[str], began: float, outage: Outage
    ) -> str | None:
        """Record an attempt that failed because of an outage, and return a message for the user, or None. `able` holds
        the nodes that are large enough for a worker, or nothing if no worker can start on them.

        The job pauses once more than half of these nodes fail in this way. If fewer nodes fail, the cause is assumed to
        be local. Raises WorkError if the last probe has failed.
        """
        now = self.last_outage = time.monotonic()
        self.affected.add(key)
        self.failing = (self.failing | {node or ""}).intersection({"", *able})
        if self.is_open and not self._is_probe(began):
            return None
        if not self.is_open:
            if 2 * len(self.failing) <= len(able):
                return None
            self.paused_at = now
        # the cause may differ between probes, so every failed probe during a pause counts toward the limit
        self.probed.append(key)
        self.unfit = 0 if outage.is_transient else self.unfit + 1
        seconds = now - self.paused_at
        if len(self.probed) >= self.most or self.unfit >= UNFIT_PROBES:
            tried = ", ".join(sorted(set(self.probed)))
            attempts = "1 attempt" if len(self.probed) == 1 else f"{len(self.probed)} consecutive attempts"
            raise WorkError(
                f"{attempts} (at {tried}) failed because of an outage that has lasted "
                f"{seconds:.0f} s. Committed work is kept. Fix the cause and run the same command again. The last "
                f"error was: {outage}"
            )
        pause = backoff(len(self.probed), FIRST_PAUSE_SECONDS)
        self.next_probe = now + pause
        return f"The job has been paused for {seconds:.0f} s and will retry in {pause:.0f} s: {outage}"
