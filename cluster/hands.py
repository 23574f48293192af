"""Which attempt goes to which worker, and how many workers there should be: arithmetic, without Ray."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Work = TypeVar("Work")


@dataclass(eq=False)
class Worker:
    """A process that makes attempts, one or several at once."""

    actor: Any
    arrival: Any
    """What Ray says when it has begun, or cannot."""
    node: str | None = None
    """None before it has begun."""
    in_hand: int = 0
    """Attempts."""
    alone: bool = False
    """What it has in hand must not be lost with others."""


@dataclass(eq=False)
class Attempt(Generic[Work]):
    """One that the cluster was given; it waits until a worker has it in hand."""

    key: str
    work: Work
    number: int
    avoid: frozenset[str]
    """Nodes that it may not go to."""
    alone: bool = False
    """It was lost before, maybe with its process: others are not in hand beside it, to be lost again and again."""
    worker: Worker | None = None
    outcome: Any = None
    """What Ray says when it has ended."""
    cancelled: bool = False


def assign(
    waiting: deque[Attempt[Work]], workers: list[Worker], at_once: int, places: int
) -> Iterator[tuple[Attempt[Work], Worker]]:
    """Who of those that wait goes to whom: to the worker with the fewest in hand, of at most `at_once`.

    Nobody gets a second one that a worker on its way could begin with: as many as have room on the cluster's `places`.
    """
    begun = [worker for worker in workers if worker.node is not None]
    coming = min(len(workers), places) - len(begun)
    free = [worker for worker in begun if worker.in_hand < at_once and not (worker.in_hand and worker.alone)]
    for attempt in list(waiting) if free else []:
        to_spare = len(waiting) > coming
        shares = to_spare and not attempt.alone
        may = [
            worker
            for worker in free
            if worker.node not in attempt.avoid
            and (not worker.in_hand or (shares and not worker.alone and worker.in_hand < at_once))
        ]
        if may:
            worker = min(may, key=lambda worker: worker.in_hand)
            worker.in_hand += 1
            worker.alone = attempt.alone
            attempt.worker = worker
            waiting.remove(attempt)
            yield attempt, worker


def wanted(waiting: deque[Attempt[Work]], running: int, workers: list[Worker], most: int) -> list[frozenset[str]]:
    """The workers to ask for, up to `most` in all: each by the nodes that it may not be on."""
    missing = min(len(waiting) + running, most) - len(workers)
    nowhere_yet = (a.avoid for a in waiting if workers and a.avoid.issuperset(worker.node or "" for worker in workers))
    return [frozenset()] * missing if missing > 0 else list(nowhere_yet)[:1]


def surplus(waiting: deque[Attempt[Work]], running: int, workers: list[Worker]) -> list[Worker]:
    """Workers that have not begun, and that nothing waits for."""
    coming = [worker for worker in workers if worker.node is None]
    begun = {worker.node for worker in workers if worker.node is not None}
    # the last that was asked for is for one that may go to nobody who has begun
    kept = int(bool(begun) and any(attempt.avoid >= begun for attempt in waiting))
    return coming[: max(0, min(len(workers) - len(waiting) - running, len(coming) - kept))]
