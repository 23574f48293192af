"""A cluster that a test plays, with a clock of its own, and the fleet on it."""

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest

from cluster import fleet as fleet_module
from cluster.board import Reported
from cluster.fleet import Done, Failed, Fleet, FleetConfig, News, UnderWay
from cluster.nodes import Resources
from cluster.ray_cluster import Cancelled, Failure, Report

Outcome = str | Exception
Event = Done[str] | Failed | News | UnderWay


def error(final: bool = False, lost: bool = False) -> Failure:
    return Failure(lost, final, "ValueError: no", "ValueError: no")


class Cluster:
    """Two nodes; each attempt ends as `play` says, at once, on the first node that it may go to."""

    def __init__(self, play: Callable[[str, int, str], Outcome | None]):
        self.play = play
        self.nodes: dict[str, Resources] = {"a": {"CPU": 1}, "b": {"CPU": 1}}
        self.attempts: list[tuple[str, int, list[str]]] = []
        self.cancelled: set[int] = set()

    def alive(self) -> dict[str, Resources]:
        return dict(self.nodes)

    def start(self, key: str, work: str, number: int, avoid: list[str], alone: bool = False) -> int:
        self.attempts.append((key, number, avoid))
        return len(self.attempts) - 1

    def _outcome(self, attempt: int) -> Outcome | None:
        key, number, _ = self.attempts[attempt]
        return Cancelled() if attempt in self.cancelled else self.play(key, number, self.node_of(key, number) or "")

    def ended(self, attempts: list[int], seconds: float) -> list[int]:
        return [attempt for attempt in attempts if self._outcome(attempt) is not None][:1]

    def result(self, attempt: int) -> str:
        outcome = self._outcome(attempt)
        if isinstance(outcome, str):
            return outcome
        assert outcome is not None
        raise outcome

    def hold(self, places: int, most: int) -> None:
        pass

    def last_report(self, key: str, number: int) -> Reported | None:
        node = self.node_of(key, number)
        return Reported(node, "worker.err") if node else None

    def cancel(self, attempt: int) -> None:
        self.cancelled.add(attempt)

    def drain(self, attempts: list[int]) -> list[int]:
        return [attempt for attempt in attempts if isinstance(self._outcome(attempt), str)]

    def reported(self, running: set[tuple[str, int]]) -> int:
        return 10 * len(running)

    def node_of(self, key: str, number: int) -> str | None:
        avoided = next(avoid for k, n, avoid in reversed(self.attempts) if (k, n) == (key, number))
        return next((node for node in self.nodes if node not in avoided), None)


def make_fleet(
    monkeypatch: pytest.MonkeyPatch, cluster: Cluster, keys: Iterable[str], **config: float | str
) -> Fleet[str, str]:
    monkeypatch.setattr(fleet_module, "RayCluster", lambda *_: cluster)
    monkeypatch.setattr("cluster.nodes.LOOK_SECONDS", 0.0)
    options = {"num_gpus": 0, "num_cpus": 1, "backoff": 0} | config

    def function(work: str, number: int, report: Report) -> str:
        raise AssertionError("the cluster is played")

    return Fleet(FleetConfig.model_validate(options), function, ((key, key.upper()) for key in keys))


def told(events: Iterator[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event, UnderWay)]


class Clock:
    """Simulated seconds; `time.monotonic` and `time.sleep` are its own while a test has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("time.sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def until(self, second: float) -> None:
        self.now = max(self.now, second)


class RealClock(Clock):
    """The machine's own."""

    def __init__(self) -> None:
        pass

    @property
    def now(self) -> float:  # type: ignore[override]
        return time.monotonic()

    def until(self, second: float) -> None:
        time.sleep(max(0.0, second - self.now))


@dataclass
class Attempt:
    """One at a time on a slot."""

    key: str
    number: int
    avoid: list[str]
    node: str | None = None
    ends: float = math.inf
    outcome: Outcome = ""


class TimedCluster(Cluster):
    """Nodes with one slot for each of their CPUs. `act` says, when an attempt begins (key, node, now), for how many
    seconds it lasts, and how it ends."""

    def __init__(self, clock: Clock, nodes: dict[str, int], act: Callable[[str, str, float], tuple[float, Outcome]]):
        self.clock, self.act = clock, act
        self.nodes = {node: {"CPU": float(cpus)} for node, cpus in nodes.items()}
        self.given: list[Attempt] = []
        self.waiting: list[Attempt] = []
        self.begun: dict[tuple[str, int], Attempt] = {}
        self.at_work: list[tuple[float, str]] = []
        """A heap: when each attempt that was begun ends, and its node."""
        self.at_work_on: Counter[str] = Counter()
        self.most_busy = 0

    def start(self, key: str, work: str, number: int, avoid: list[str], alone: bool = False) -> int:
        self.given.append(Attempt(key, number, avoid))
        self.waiting.append(self.given[-1])
        return len(self.given) - 1

    def busy(self) -> Counter[str]:
        """Node → attempts that are at work on it."""
        while self.at_work and self.at_work[0][0] <= self.clock.now:
            self.at_work_on[heapq.heappop(self.at_work)[1]] -= 1
        return +self.at_work_on

    def _begin(self) -> None:
        """Have attempts that wait begin, the first ones first, each on the least busy node that it may go to."""
        # they begin at one moment, however long this takes
        now, busy, waiting = self.clock.now, self.busy(), self.waiting
        free = {node: has["CPU"] for node, has in self.nodes.items() if busy[node] < has["CPU"]}
        self.waiting = []
        for number, attempt in enumerate(waiting):
            if not free:
                self.waiting += waiting[number:]
                break
            if not (may := [node for node in free if node not in attempt.avoid]):
                self.waiting.append(attempt)
                continue
            attempt.node = node = min(may, key=lambda node: busy[node])
            seconds, attempt.outcome = self.act(attempt.key, node, now)
            attempt.ends = now + seconds
            self.begun[attempt.key, attempt.number] = attempt
            heapq.heappush(self.at_work, (attempt.ends, node))
            self.at_work_on[node] += 1
            busy[node] += 1
            if busy[node] >= free[node]:
                del free[node]
        self.most_busy = max(self.most_busy, busy.total())

    def ended(self, attempts: list[int], seconds: float) -> list[int]:
        if not attempts:
            return []
        self._begin()
        self.clock.until(min(self.clock.now + seconds, *(self.given[attempt].ends for attempt in attempts)))
        now = self.clock.now
        return [attempt for attempt in attempts if self.given[attempt].ends <= now][:1]

    def result(self, attempt: int) -> str:
        outcome = self.given[attempt].outcome
        if isinstance(outcome, str):
            return outcome
        raise outcome

    def drain(self, attempts: list[int]) -> list[int]:
        return [attempt for attempt in attempts if self.given[attempt].ends <= self.clock.now]

    def node_of(self, key: str, number: int) -> str | None:
        return self.begun[key, number].node
