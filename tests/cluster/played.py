"""A pool of workers scripted by the test, with real or simulated time, and a fleet on it."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from cluster.actor import Report
from cluster.fleet import Event, Fleet, FleetConfig, UnderWay
from cluster.nodes import Resources
from cluster.placement import Worker
from cluster.pool import Failure, RunningAttempt, StartFailure, WorkerPool
from cluster.retry import Unit

Outcome = str | Exception
"""Result of an attempt, or what it raises."""


def error(final: bool = False, lost: bool = False) -> Failure:
    return Failure(lost, final, "ValueError: no", "ValueError: no")


class PlayedPool(WorkerPool[str, str]):
    """Workers on nodes that have one place per CPU. Each attempt ends at once, as `play` (key, number, node) returns;
    None means that it has not ended yet."""

    def __init__(self, play: Callable[[str, int, str], Outcome | None], nodes: dict[str, int] | None = None):
        self.play = play
        self.nodes: dict[str, Resources] = {
            node: {"CPU": float(cpus)} for node, cpus in ({"a": 1, "b": 1} if nodes is None else nodes).items()
        }
        self.workers: list[Worker] = []
        self.running: list[RunningAttempt[str]] = []
        self.begun: list[tuple[str, int, str]] = []
        """Key, number and node of each attempt, in order."""

    def alive(self) -> dict[str, Resources]:
        for worker in list(self.workers):
            if not worker.running and worker.node is not None and worker.node not in self.nodes:
                self.dismiss(worker)
        return dict(self.nodes)

    def use(self, function: object) -> None:
        """Ignore the function, because attempts are scripted."""

    def add(self, avoid: frozenset[str]) -> None:
        self.workers.append(Worker(avoid, None, time.monotonic()))

    def dismiss(self, worker: Worker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)

    def place(self) -> bool:
        """Start workers where there is room, spread over the nodes. Return whether there were any."""
        num_started = sum(worker.node is not None for worker in self.workers)
        if num_started == len(self.workers) or num_started >= sum(has["CPU"] for has in self.nodes.values()):
            return False
        used = Counter(worker.node for worker in self.workers)
        free = {node: int(has["CPU"]) - used[node] for node, has in self.nodes.items() if has["CPU"] > used[node]}
        placed = False
        for worker in self.workers:
            if not free:
                break
            if worker.node is None and (able := [node for node in free if node not in worker.actor]):
                worker.node = node = min(able, key=lambda node: used[node])
                used[node] += 1
                free[node] -= 1
                if not free[node]:
                    del free[node]
                placed = True
        return placed

    def start(self, unit: Unit[str], worker: Worker) -> None:
        assert worker.node is not None
        self.running.append(RunningAttempt(unit, unit.attempt, worker, None, time.monotonic()))
        self.begun.append((unit.key, unit.attempt, worker.node))

    def outcome(self, attempt: RunningAttempt[str]) -> Outcome | None:
        return self.play(attempt.unit.key, attempt.number, attempt.worker.node or "")

    def wait(self, seconds: float) -> list[RunningAttempt[str] | StartFailure]:
        if self.place():
            return []
        return list[RunningAttempt[str] | StartFailure](a for a in self.running if self.outcome(a) is not None)[:1]

    def result(self, attempt: RunningAttempt[str]) -> str:
        outcome = self.outcome(attempt)
        self.running.remove(attempt)
        attempt.worker.running.remove(attempt.unit)
        if (isinstance(outcome, Failure) and outcome.is_lost) or attempt.worker.node not in self.nodes:
            self.dismiss(attempt.worker)
        if isinstance(outcome, str):
            return outcome
        assert outcome is not None
        raise outcome

    def drain(self) -> list[RunningAttempt[str]]:
        return [attempt for attempt in self.running if isinstance(self.outcome(attempt), str)]

    def reported(self) -> int:
        return 10 * len(self.running)


def make_fleet(
    monkeypatch: pytest.MonkeyPatch, pool: PlayedPool, keys: Iterable[str], **config: float | str
) -> Fleet[str, str]:
    monkeypatch.setattr("cluster.nodes.LOOK_SECONDS", 0.0)
    options = {"num_gpus": 0, "num_cpus": 1, "backoff": 0} | config

    def function(work: str, number: int, report: Report) -> str:
        raise AssertionError("attempts are scripted")

    return Fleet(FleetConfig.model_validate(options), function, ((key, key.upper()) for key in keys), pool=pool)


def without_state(events: Iterable[Event[str]]) -> list[Any]:
    """All events but `UnderWay`."""
    return [event for event in events if not isinstance(event, UnderWay)]


class Clock:
    """Simulated seconds, which replace `time.monotonic` and `time.sleep` during a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("time.sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def until(self, second: float) -> None:
        self.now = max(self.now, second)


class RealClock(Clock):
    """The machine's clock."""

    def __init__(self) -> None:
        pass

    @property
    def now(self) -> float:  # type: ignore[override]
        return time.monotonic()

    def until(self, second: float) -> None:
        time.sleep(max(0.0, second - self.now))


class TimedPool(PlayedPool):
    """Attempts that take time. When an attempt begins, `act` (key, node, now) returns how many seconds it takes, and
    how it ends."""

    def __init__(self, clock: Clock, nodes: dict[str, int], act: Callable[[str, str, float], tuple[float, Outcome]]):
        super().__init__(lambda *_: None, nodes)
        self.clock, self.act = clock, act
        self.most_busy = 0

    def start(self, unit: Unit[str], worker: Worker) -> None:
        super().start(unit, worker)
        attempt = self.running[-1]
        seconds, outcome = self.act(unit.key, worker.node or "", self.clock.now)
        attempt.result = (self.clock.now + seconds, outcome)
        self.most_busy = max(self.most_busy, len(self.running))

    def outcome(self, attempt: RunningAttempt[str]) -> Outcome | None:
        ends, outcome = attempt.result
        return outcome if ends <= self.clock.now else None

    def busy(self) -> int:
        """Attempts that have not ended."""
        return sum(attempt.result[0] > self.clock.now for attempt in self.running)

    def wait(self, seconds: float) -> list[RunningAttempt[str] | StartFailure]:
        if self.place():
            return []
        if self.is_idle:
            return []
        first = min(self.running, key=lambda attempt: attempt.result[0], default=None)
        self.clock.until(min(self.clock.now + seconds, first.result[0] if first else math.inf))
        return [first] if first and first.result[0] <= self.clock.now else []
