"""The circuit breaker: while what a job works with is out of order, it waits, and spends no attempts.

That is storage, credentials, models and the cluster. One attempt at a time then probes whether they are back, at waits
that grow. Arithmetic, without Ray.
"""

import math
import time
from collections.abc import Collection, Iterable

from pydantic import Field

from cluster.attempts import backoff
from shards.base.config import Config
from shards.base.errors import Outage, WorkError

FIRST_PAUSE_SECONDS = 5.0
UNFIT_PROBES = 4
"""Probes of what waiting does not mend, 35 s after the first: people had better hear of it."""


class OutageConfig(Config):
    """When a job stops to wait for what it works with."""

    outage_probes: int = Field(16, ge=1)
    """Attempts in a row, each at another unit of work while there are others, that storage, credentials or the cluster
    fail before the job stops: the waits between them grow to five minutes, 50 in all."""


class Breaker:
    """Whether a job pauses, and when it tries again."""

    def __init__(self, config: OutageConfig):
        self.most = config.outage_probes
        self.went_well = -math.inf
        """When the last attempt began that did."""
        self.met_at = -math.inf
        """When an outage last ended one."""
        self.keys: set[str] = set()
        """Of the units that meet it."""
        self.failing: set[str] = set()
        """Nodes with an outage since their last success."""
        self.probed: list[str] = []
        """Keys of the units that showed this pause to be needed, whatever the cause."""
        self.unfit = 0
        """How many of them in a row met what waiting does not mend."""
        self.since = self.next_probe = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the job pauses."""
        return bool(self.probed)

    def room(self, room: int, began: Iterable[float]) -> int:
        """How many attempts may begin where there is `room`; when those `began` that are under way."""
        if not self.is_open:
            return room
        return min(room, int(time.monotonic() >= self.next_probe and not any(map(self._is_probe, began))))

    def _is_probe(self, began: float) -> bool:
        return self.is_open and began > self.since

    def succeeded(self, node: str | None, began: float) -> str | None:
        """An attempt went well; returns what there is to say."""
        self.went_well = max(self.went_well, began)
        self.failing.discard(node or "")
        paused = self.is_open
        if began <= (self.since if paused else self.met_at):
            return None  # it may have had all that it needed before
        self.probed = []
        self.unfit = 0
        self.keys.clear()
        if not paused:
            return None
        self.failing.clear()
        return f"It works again: the job goes on, after {time.monotonic() - self.since:.0f} s"

    def failed(self, key: str, node: str | None, able: Collection[str], began: float, outage: Outage) -> str | None:
        """An outage ended an attempt, on one of the `able` nodes; returns what there is to say.

        A job pauses once most of its nodes meet outages. What a few nodes meet is their own.

        Raises:
            WorkError: this one was the last probe.
        """
        now = self.met_at = time.monotonic()
        self.keys.add(key)
        self.failing = (self.failing | {node or ""}).intersection({"", *able})
        if self.is_open and not self._is_probe(began):
            return None
        if not self.is_open:
            if 2 * len(self.failing) <= len(able):
                return None
            self.since = now
        # causes may alternate, so each probe of a pause counts towards its end
        self.probed.append(key)
        self.unfit = 0 if outage.is_transient else self.unfit + 1
        seconds = now - self.since
        if len(self.probed) >= self.most or self.unfit >= UNFIT_PROBES:
            tried = ", ".join(sorted(set(self.probed)))
            raise WorkError(
                f"{len(self.probed)} attempts in a row ({tried}) met an outage, over {seconds:.0f} s. The last one: "
                f"{outage} Mend that, and give the same command again. What was committed stays."
            )
        pause = backoff(len(self.probed), FIRST_PAUSE_SECONDS)
        self.next_probe = now + pause
        return f"The job pauses, for {seconds:.0f} s so far, and tries again in {pause:.0f} s: {outage}"
