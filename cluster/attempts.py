"""Where and when a unit of work is tried again: arithmetic over attempts and nodes, without Ray.

An attempt that raised is an error, which the unit may have caused. An attempt whose process or node went away is lost,
which it mostly did not cause: preempted machines lose attempts. Each kind has a bound of its own.
"""

import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import Field

from shards.base.config import Config

Work = TypeVar("Work")

LONGEST_BACKOFF_SECONDS = 300.0
SUSPENSION_SECONDS = 600.0


class RetryConfig(Config):
    """How often what failed is tried again."""

    attempts: int = Field(3, ge=1)
    """How often a unit of work, in stage 1 a tar, is tried before it is reported as failed."""
    lost_attempts: int = Field(10, ge=1)
    """The same for attempts whose process or node went away, as preempted machines do; they do not count as tries."""
    backoff: float = Field(5.0, ge=0)
    """Seconds before a unit's second attempt; doubled for each further one, five minutes at most."""
    node_failures: int = Field(5, ge=1)
    """Failed attempts in a row after which a node gets no work for ten minutes, while there are others."""


@dataclass
class Attempts(Generic[Work]):
    """A unit of work, and the attempts at it so far."""

    key: str
    work: Work
    errors: int = 0
    lost: int = 0
    not_before: float = 0.0
    """By `time.monotonic`."""
    failed_on: str | None = None
    """The node of the last one."""
    outage_at: float | None = None
    """When an outage last ended an attempt, by `time.monotonic`."""

    @property
    def number(self) -> int:
        """Of the next or current attempt, from 1."""
        return self.errors + self.lost + 1

    def last(self, lost: bool, config: RetryConfig) -> str:
        """Which attempt it was that failed, for people."""
        if lost:
            return f"an attempt was lost ({self.lost} of {config.lost_attempts})"
        return f"attempt {self.errors} of {config.attempts} failed"

    def fail(self, lost: bool, node: str | None, config: RetryConfig) -> bool:
        """Count a failed attempt; returns whether another one follows, after a wait that doubles each time."""
        self.lost += lost
        self.errors += not lost
        self.failed_on = node
        self.not_before = time.monotonic() + backoff(self.number - 1, config.backoff)
        return self.errors < config.attempts and self.lost < config.lost_attempts

    def spare(self, went_well: float, others: bool, node: str | None, config: RetryConfig) -> bool:
        """Take an outage off this unit's account; False where it may be its own, and not for the first time.

        `went_well`: when the last attempt at any unit began that did; `others`: whether other units meet outages too.
        """
        before, self.outage_at = self.outage_at, time.monotonic()
        if before is not None and (went_well > before or not others):
            return False
        self.failed_on, self.not_before = node, self.outage_at + config.backoff
        return True


def backoff(failures: int, seconds: float) -> float:
    """Seconds to wait after `failures` failed attempts: s, 2s, 4s, …, five minutes at most."""
    return min(seconds * 2 ** (failures - 1), LONGEST_BACKOFF_SECONDS)


class Queue(Generic[Work]):
    """Units of work that wait: first those that were never tried, in their order, and after them those that failed.

    (Of a storage that is away for a while, every unit then loses one attempt, and not the first ones all of theirs.)
    """

    def __init__(self, units: Iterable[tuple[str, Work]]):
        self.fresh: Iterator[tuple[str, Work]] | None = iter(units)
        self.again: deque[Attempts[Work]] = deque()

    def __bool__(self) -> bool:
        """Whether there may be more."""
        return self.fresh is not None or bool(self.again)

    def put_back(self, attempts: Attempts[Work]) -> None:
        """It is to be tried again."""
        self.again.append(attempts)

    def put_last(self, keys: Collection[str]) -> None:
        """Have these come after the others that failed."""
        self.again = deque(sorted(self.again, key=lambda attempts: attempts.key in keys))

    def take_due(self, room: int) -> Iterator[Attempts[Work]]:
        """Up to `room` units whose time has come. No more are asked of the iterable than there is room for."""
        while room > 0 and self.fresh is not None:
            if (unit := next(self.fresh, None)) is None:
                self.fresh = None
                break
            room -= 1
            yield Attempts(*unit)
        for _ in range(len(self.again)):
            attempts = self.again.popleft()
            if room > 0 and attempts.not_before <= time.monotonic():
                room -= 1
                yield attempts
            else:
                self.again.append(attempts)

    def seconds_until_due(self) -> float:
        """Until the first of those that failed may be tried again."""
        return max(0.0, min((attempts.not_before for attempts in self.again), default=0.0) - time.monotonic())


class Nodes:
    """Which nodes fail one attempt after another, so that they do not use up every unit's attempts."""

    def __init__(self, node_failures: int):
        self.node_failures = node_failures
        self.in_a_row: Counter[str] = Counter()
        self.suspended: dict[str, float] = {}
        """Node → until when."""

    def succeeded(self, node: str | None) -> None:
        """An attempt on `node` went well."""
        if node is not None:
            self.in_a_row.pop(node, None)
            self.suspended.pop(node, None)

    def failed(self, node: str | None) -> bool:
        """An attempt on `node` failed; returns whether that suspends it now.

        A suspension ends after ten minutes, in case it was the work; one more failure then renews it.
        """
        if node is None:
            return False
        self.in_a_row[node] += 1
        if self.in_a_row[node] < self.node_failures:
            return False
        self.suspended[node] = time.monotonic() + SUSPENSION_SECONDS
        return True

    def avoid(self, failed_on: str | None, able: Iterable[str]) -> list[str]:
        """The nodes that the next attempt stays away from: suspended ones, and that of the last attempt.

        None, where that would leave no node of those that are `able` to take it.
        """
        able, now = set(able), time.monotonic()
        bad = {node for node, until in self.suspended.items() if until > now}
        for avoided in (bad | {failed_on} if failed_on else bad, bad):
            if able - avoided:
                return sorted(able & avoided)
        return []
