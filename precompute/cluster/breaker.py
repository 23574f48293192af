"""The circuit breaker: while what a job works with is out of order, it waits, and spends no attempts.

That is storage, credentials, models and the cluster. One attempt at a time then probes whether they are back, at waits
that grow. Arithmetic, without Ray.
"""

import time
from collections.abc import Collection

from pydantic import Field

from precompute.cluster.attempts import backoff
from shards.base.config import Config
from shards.base.errors import Outage, WorkError

FIRST_PAUSE_SECONDS = 5.0
UNFIT_PROBES = 4
"""Probes of what waiting does not mend, 35 s after the first: people had better hear of it."""


class OutageConfig(Config):
    """When a job stops to wait for what it works with."""

    outage_probes: int = Field(16, ge=1)
    """Attempts in a row, each at another unit of work while there are others, that storage, credentials or the cluster
    fail before the job stops: the waits between them grow to five minutes, about an hour in all."""


class Breaker:
    """Whether a job pauses, and when it tries again."""

    def __init__(self, config: OutageConfig):
        self.most = config.outage_probes
        self.successes = 0
        self.failing: set[str | None] = set()
        """Nodes with an outage since the last success of any."""
        self.probed: list[str] = []
        """Keys of the units that showed this pause to be needed."""
        self.passes = True
        self.since = self.next_probe = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the job pauses."""
        return bool(self.probed)

    def room(self, room: int, probes: int) -> int:
        """How many attempts may begin where there is `room`, and `probes` are under way."""
        if not self.is_open:
            return room
        return min(room, int(not probes and time.monotonic() >= self.next_probe))

    def succeeded(self) -> str | None:
        """An attempt went well; returns what there is to say."""
        paused, self.probed = self.is_open, []
        self.failing.clear()
        self.successes += 1
        return f"It works again: the job goes on, after {time.monotonic() - self.since:.0f} s" if paused else None

    def failed(self, key: str, node: str | None, able: Collection[str], is_probe: bool, outage: Outage) -> str | None:
        """An outage ended an attempt, on one of the `able` nodes; returns what there is to say.

        A job pauses once most of its nodes meet outages while none succeeds. What a few nodes meet is their own.

        Raises:
            WorkError: this one was the last probe.
        """
        now = time.monotonic()
        self.failing.add(node)
        if (self.is_open and not is_probe) or 2 * len(self.failing) <= len(able):
            return None
        if not self.is_open:
            self.since = now
        if outage.passes != self.passes:
            self.passes, self.probed = outage.passes, []  # another cause
        self.probed.append(key)
        seconds = now - self.since
        if len(self.probed) >= (self.most if outage.passes else min(self.most, UNFIT_PROBES)):
            tried = ", ".join(sorted(set(self.probed)))
            raise WorkError(
                f"{len(self.probed)} attempts in a row ({tried}) met an outage, over {seconds:.0f} s. The last one: "
                f"{outage} Mend that, and give the same command again. What was committed stays."
            )
        pause = backoff(len(self.probed), FIRST_PAUSE_SECONDS)
        self.next_probe = now + pause
        return f"The job pauses, for {seconds:.0f} s so far, and tries again in {pause:.0f} s: {outage}"
