"""Retry policy: when and where a failed unit of work runs again. Pure logic over units and nodes, without Ray.

An attempt that raised an exception counts as an error, because the unit may have caused it. An attempt whose process or
node died counts as lost, because the cause, such as preemption, may not be the unit. Errors and lost attempts have
separate limits.
"""

import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from pydantic import Field

from shards.base.config import Config

Work = TypeVar("Work")

MAX_BACKOFF_SECONDS = 300.0
SUSPENSION_SECONDS = 600.0
AVOID_SECONDS = 120.0
"""Seconds that a unit waits for a node other than the one where it failed."""


class RetryConfig(Config):
    """Limits on retries of failed attempts."""

    attempts: int = Field(3, ge=1)
    """Number of attempts at a unit of work (in stage 1, a tar) that may raise an error before the unit is reported as
    failed."""
    lost_attempts: int = Field(10, ge=1)
    """Number of attempts at a unit that may be lost with their process or node, for example to preemption, before the
    unit is reported as failed. Lost attempts do not count towards `attempts`."""
    backoff: float = Field(5.0, ge=0)
    """Delay in seconds before a unit's second attempt. It doubles with each further attempt, up to five minutes."""
    node_failures: int = Field(5, ge=1)
    """Number of consecutive failed attempts after which a node gets no work for ten minutes, as long as other nodes can
    take the work."""


@dataclass(eq=False)
class Unit(Generic[Work]):
    """A unit of work and the record of its failed attempts."""

    key: str
    work: Work
    errors: int = 0
    """Number of attempts that raised an exception."""
    lost: int = 0
    """Number of attempts whose process or node died."""
    not_before: float = 0.0
    """Earliest time of the next attempt, by `time.monotonic`."""
    failed_on: str | None = None
    """Node of the last failed attempt."""
    offered_at: float | None = None
    """Time at which the unit could first start after that attempt, by `time.monotonic`."""
    outage_at: float | None = None
    """Time at which an attempt at this unit last failed because of an outage, by `time.monotonic`."""

    @property
    def attempt(self) -> int:
        """Number of the current or next attempt, counted from 1."""
        return self.errors + self.lost + 1

    def avoided_node(self) -> str | None:
        """Return the node where the last attempt failed, or None once the unit has waited AVOID_SECONDS for a different
        node, because the others may be busy with another job for days. The wait begins with the first call."""
        if self.offered_at is None:
            self.offered_at = time.monotonic()
        return self.failed_on if time.monotonic() < self.offered_at + AVOID_SECONDS else None

    @property
    def runs_alone(self) -> bool:
        """Whether a worker must run this unit by itself. A unit that was lost twice may be killing its process, and
        all other units in the process would be lost with it."""
        return self.lost > 1

    def record_failure(self, lost: bool, node: str | None, config: RetryConfig) -> bool:
        """Count a failed attempt and set the backoff. Return whether the unit may be tried again."""
        self.lost += lost
        self.errors += not lost
        self.failed_on, self.offered_at = node, None
        self.not_before = time.monotonic() + backoff(self.attempt - 1, config.backoff)
        return self.errors < config.attempts and self.lost < config.lost_attempts

    def describe_failure(self, lost: bool, config: RetryConfig) -> str:
        """Describe the last failure for a message, such as `attempt 2 of 3 failed`."""
        if lost:
            return f"an attempt was lost ({self.lost} of {config.lost_attempts} allowed)"
        return f"attempt {self.errors} of {config.attempts} failed"

    def excuse_outage(self, last_success: float, others_affected: bool, node: str | None, config: RetryConfig) -> bool:
        """Schedule a retry after an outage without counting the attempt.

        Args:
            last_success: start time of the most recently started attempt, at any unit, that succeeded.
            others_affected: whether other units have hit the outage too.
            node: node of the attempt, or None if its worker could not start. The unit did not run then, and cannot be
                the cause.

        Returns:
            False if this unit had an outage before and appears to be the only one affected. In that case, the unit
            itself may be the cause (for example, an object that cannot be read), and the attempt must be counted.
        """
        now = time.monotonic()
        if node is not None:
            previous, self.outage_at = self.outage_at, now
            if previous is not None and (last_success > previous or not others_affected):
                return False
        self.failed_on, self.offered_at, self.not_before = node, None, now + config.backoff
        return True


def backoff(failures: int, seconds: float) -> float:
    """Return the delay after `failures` failed attempts: `seconds` at first, then doubled each time, up to five
    minutes."""
    return min(seconds * 2 ** min(failures - 1, 60), MAX_BACKOFF_SECONDS)  # 2.0**1024 would overflow


class UnitQueue(Generic[Work]):
    """Units that wait for a worker: new units in their original order, then failed units.

    Because new units come first, an outage costs many units one attempt each, rather than costing a few units all of
    their attempts.
    """

    def __init__(self, units: Iterable[tuple[str, Work]]):
        self.source: Iterator[tuple[str, Work]] | None = iter(units)
        """Iterator over the units not read yet; None once it is exhausted."""
        self.new: deque[Unit[Work]] = deque()
        """Units read from the source that have not been tried."""
        self.failed: deque[Unit[Work]] = deque()

    def __bool__(self) -> bool:
        """Return whether any units may still need to run."""
        return self.source is not None or bool(self.new or self.failed)

    def due(self, limit: int) -> list[Unit[Work]]:
        """Return the first units that may start now, at most `limit` of them, reading the source only as far as needed.
        The units stay in the queue until `remove` is called."""
        limit = max(0, limit)
        while len(self.new) < limit and self.source is not None:
            unit = next(self.source, None)
            if unit is None:
                self.source = None
            else:
                self.new.append(Unit(*unit))
        now = time.monotonic()
        found = list(islice(self.new, limit))
        retries = (unit for unit in self.failed if unit.not_before <= now)
        found.extend(islice(retries, limit - len(found)))
        return found

    def remove(self, unit: Unit[Work]) -> None:
        """Remove a unit that is about to start."""
        (self.new if unit in self.new else self.failed).remove(unit)

    def put_back(self, unit: Unit[Work]) -> None:
        """Add a failed unit for another attempt."""
        self.failed.append(unit)

    def move_to_end(self, keys: Collection[str]) -> None:
        """Order the failed units so that those in `keys` come last."""
        if keys:
            self.failed = deque(sorted(self.failed, key=lambda unit: unit.key in keys))

    def seconds_until_due(self) -> float:
        """Return the number of seconds until the first failed unit may run again."""
        first = min((unit.not_before for unit in self.failed), default=0.0)
        return max(0.0, first - time.monotonic())


class NodeHealth:
    """Record of consecutive failures per node. A node that keeps failing is suspended, so that it cannot use up every
    unit's attempts."""

    def __init__(self, node_failures: int):
        self.node_failures = node_failures
        self.failures: Counter[str] = Counter()
        """Node → consecutive failures."""
        self.suspended: dict[str, float] = {}
        """Node → end of its suspension, by `time.monotonic`."""

    def record_success(self, node: str | None) -> None:
        """Clear the record of `node` after a successful attempt."""
        if node is not None:
            self.failures.pop(node, None)
            self.suspended.pop(node, None)

    def record_failure(self, node: str | None) -> bool:
        """Count a failed attempt on `node`. Return whether the node is suspended now.

        A suspension ends after ten minutes, because the node may not have been the cause. If the node then fails again,
        it is suspended again at once.
        """
        if node is None:
            return False
        self.failures[node] += 1
        if self.failures[node] < self.node_failures:
            return False
        self.suspended[node] = time.monotonic() + SUSPENSION_SECONDS
        return True

    def avoid(self, failed_on: str | None, able: Collection[str]) -> frozenset[str]:
        """Return the nodes that a unit should avoid: suspended nodes, and the node where its last attempt failed.

        If this would rule out every node in `able` (the nodes large enough for a worker), only the suspended nodes are
        avoided. If they too make up all of `able`, no node is avoided.
        """
        now, able = time.monotonic(), frozenset(able)
        suspended = frozenset(node for node, until in self.suspended.items() if until > now)
        for avoided in (suspended | {failed_on} if failed_on else suspended, suspended):
            if able - avoided:
                return able & avoided
        return frozenset()
