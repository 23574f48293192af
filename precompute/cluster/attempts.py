"""Where and when a shard is tried again: arithmetic over attempts and nodes, without Ray.

An attempt that raised is an error, which the shard may have caused. An attempt whose process or node went away is lost,
which it mostly did not: preempted machines lose attempts. Each kind has a bound of its own.
"""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from precompute.config import WorkersConfig
from precompute.input.tars import InputShard

LONGEST_BACKOFF_SECONDS = 300.0
PAROLE_SECONDS = 600.0


@dataclass
class Attempts:
    """The attempts at one shard so far."""

    shard: InputShard
    errors: int = 0
    lost: int = 0
    not_before: float = 0.0
    """By `time.monotonic`."""
    failed_on: str | None = None
    """The node of the last one."""
    placed: list[str] = field(default_factory=list)
    """Nodes that the current one may not go to."""

    @property
    def number(self) -> int:
        """Of the next or current attempt, from 1."""
        return self.errors + self.lost + 1

    def last(self, lost: bool, workers: WorkersConfig) -> str:
        """Which attempt it was that failed, for people."""
        if lost:
            return f"an attempt was lost ({self.lost} of {workers.lost_attempts})"
        return f"attempt {self.errors} of {workers.attempts} failed"

    def fail(self, lost: bool, node: str | None, workers: WorkersConfig) -> bool:
        """Count a failed attempt; returns whether another one follows, after a wait that doubles each time."""
        self.lost += lost
        self.errors += not lost
        self.failed_on = node
        self.not_before = time.monotonic() + backoff(self.number - 1, workers.backoff)
        return self.errors < workers.attempts and self.lost < workers.lost_attempts


def backoff(failures: int, seconds: float) -> float:
    """Seconds to wait after `failures` failed attempts: s, 2s, 4s, …, five minutes at most."""
    return min(seconds * 2 ** (failures - 1), LONGEST_BACKOFF_SECONDS)


class Nodes:
    """Which nodes fail one attempt after another, so that they do not use up every shard's attempts."""

    def __init__(self, workers: WorkersConfig):
        self.workers = workers
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

        A suspension ends after ten minutes, in case it was the shards; one more failure then renews it.
        """
        if node is None:
            return False
        self.in_a_row[node] += 1
        if self.in_a_row[node] < self.workers.node_failures:
            return False
        self.suspended[node] = time.monotonic() + PAROLE_SECONDS
        return True

    def avoid(self, attempts: Attempts, able: Iterable[str]) -> list[str]:
        """The nodes that the next attempt stays away from: suspended ones, and that of the last attempt.

        None, where that would leave no node of those that are `able` to take it.
        """
        able, now = set(able), time.monotonic()
        bad = {node for node, until in self.suspended.items() if until > now}
        for avoided in (bad | {attempts.failed_on} if attempts.failed_on else bad, bad):
            if able - avoided:
                return sorted(able & avoided)
        return []
