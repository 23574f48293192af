"""A cluster that a test plays, with a clock of its own, and the fleet on it."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest

from precompute.cluster import fleet as fleet_module
from precompute.cluster.board import Reported
from precompute.cluster.fleet import Done, Failed, Fleet, FleetConfig, News, UnderWay
from precompute.cluster.nodes import Resources
from precompute.cluster.ray_cluster import Cancelled, Failure, Report

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
    monkeypatch.setattr("precompute.cluster.nodes.LOOK_SECONDS", 0.0)
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

    def start(self, key: str, work: str, number: int, avoid: list[str], alone: bool = False) -> int:
        self.given.append(Attempt(key, number, avoid))
        return len(self.given) - 1

    def busy(self) -> Counter[str | None]:
        return Counter(attempt.node for attempt in self.given if attempt.node and attempt.ends > self.clock.now)

    def _begin(self) -> None:
        busy = self.busy()
        for attempt in self.given:
            if attempt.node is None:
                free = [n for n, has in self.nodes.items() if n not in attempt.avoid and busy[n] < has["CPU"]]
                if free:
                    attempt.node = min(free, key=lambda n: busy[n])
                    busy[attempt.node] += 1
                    seconds, attempt.outcome = self.act(attempt.key, attempt.node, self.clock.now)
                    attempt.ends = self.clock.now + seconds

    def ended(self, attempts: list[int], seconds: float) -> list[int]:
        if not attempts:
            return []
        self._begin()
        self.clock.now = max(
            self.clock.now, min(self.clock.now + seconds, *(self.given[attempt].ends for attempt in attempts))
        )
        return [attempt for attempt in attempts if self.given[attempt].ends <= self.clock.now][:1]

    def result(self, attempt: int) -> str:
        outcome = self.given[attempt].outcome
        if isinstance(outcome, str):
            return outcome
        raise outcome

    def drain(self, attempts: list[int]) -> list[int]:
        return [attempt for attempt in attempts if self.given[attempt].ends <= self.clock.now]

    def node_of(self, key: str, number: int) -> str | None:
        return next(a.node for a in reversed(self.given) if (a.key, a.number) == (key, number) and a.node)
