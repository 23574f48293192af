"""Keyed units of work onto Ray workers, each retried where it fails, none able to stop the others.

    fleet = Fleet(config, function, units)
    for event in fleet:
        ledger.record(event)

It knows nothing of what the work is.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from pydantic import field_validator

from cluster.attempts import Attempts, Nodes, Queue, RetryConfig
from cluster.board import Reported
from cluster.breaker import Breaker, OutageConfig
from cluster.hands import Attempt
from cluster.nodes import ResourcesConfig, Watch
from cluster.ray_cluster import Cancelled, Failure, Function, RayCluster
from shards.base.errors import Outage, WorkError
from shards.base.stop import StopSignal

Work = TypeVar("Work")
Result = TypeVar("Result")
POLL_SECONDS = 1.0
LEAST_IN_FLIGHT = 8
"""An autoscaler adds nodes for what waits, also where there are none yet."""


class FleetConfig(RetryConfig, OutageConfig, ResourcesConfig):
    """What a worker takes of the cluster, and how often what failed is tried again."""

    max_in_flight: int | Literal["auto"] = "auto"
    """Units of work under way or about to be; `auto` is all that the workers which the cluster holds can have in hand,
    and one more for each, while it grows and shrinks."""

    @field_validator("max_in_flight")
    @classmethod
    def _some(cls, given: int | str) -> int | str:
        if isinstance(given, int) and given < 1:
            raise ValueError("give a number from 1 on, or auto")
        return given

    def in_flight(self, places: int, at_once: int = 1) -> int:
        """How many units, where the cluster holds `places` workers with `at_once` in hand each."""
        return max(LEAST_IN_FLIGHT, (at_once + 1) * places) if self.max_in_flight == "auto" else self.max_in_flight


@dataclass(frozen=True)
class Done(Generic[Result]):
    """An attempt at a unit came to a result."""

    key: str
    node: str | None
    """Its address."""
    result: Result


@dataclass(frozen=True)
class Failed:
    """An attempt at a unit failed."""

    key: str
    node: str | None
    which: str
    """`attempt 2 of 3 failed`."""
    failure: Failure
    again: bool
    """Whether another attempt follows."""
    number: int = 1
    """Of the attempt."""
    in_pause: bool = False
    """The job pauses for this outage, which there is `News` of."""
    log: str = ""
    """The worker's, on that node."""


@dataclass(frozen=True)
class News:
    """What people should hear of the cluster."""

    text: str


@dataclass(frozen=True)
class UnderWay:
    """About once a second, after attempts have ended, and at the end: how many attempts were begun and have not ended,
    and what they report in all."""

    attempts: int
    reported: int
    paused: bool = False
    """Whether the job waits for an outage to end."""


@dataclass(frozen=True)
class _Running(Generic[Work]):
    unit: Attempts[Work]
    avoided: frozenset[str]
    """Nodes that this attempt may not go to."""
    began: float
    """When it was handed to the cluster, by `time.monotonic`."""


class Fleet(Generic[Work, Result]):
    """Attempts at units of work on the Ray cluster that `start_ray` joined or started; iterate over it once.

    It ends when each unit is done or has failed for good. On SIGTERM, SIGUSR1 or SIGINT it interrupts the attempts that
    are under way, and ends with the results of those that were through by then.

    Raises:
        WorkError: no node of the cluster could take a worker for `wait_for_resources` seconds, or an outage lasted for
            `outage_probes` attempts.
    """

    def __init__(
        self, config: FleetConfig, function: Function[Work, Result], units: Iterable[tuple[str, Work]], at_once: int = 1
    ):
        """`units`: key and work of each; as many as there is room for are asked for at a time. `at_once`: how many a
        worker has in hand, each in a thread of its own."""
        self.config, self.at_once = config, at_once
        self.cluster = RayCluster(config, function, at_once)
        self.queue = Queue(units)
        self.watch, self.nodes, self.breaker = Watch(config), Nodes(config.node_failures), Breaker(config)
        self.running: dict[Attempt[Work], _Running[Work]] = {}

    def __iter__(self) -> Iterator[Done[Result] | Failed | News | UnderWay]:
        with StopSignal() as stop:  # after ray.init, which listens to SIGTERM itself
            while (self.queue or self.running) and not stop.received:
                if self.watch.is_due and (news := self.watch.look(self.cluster.alive())):
                    yield News(news)
                self.cluster.hold(self.watch.places, self.config.in_flight(self.watch.places))
                self._start()
                for attempt in self.cluster.ended(list(self.running), POLL_SECONDS):
                    yield from self._settle(attempt)
                self._take_back_stranded()
                at_work = {(running.unit.key, running.unit.number) for running in self.running.values()}
                yield UnderWay(len(self.running), self.cluster.reported(at_work), self.breaker.is_open)
                if not self.running:
                    due = POLL_SECONDS if self.breaker.is_open else self.queue.seconds_until_due()
                    time.sleep(min(POLL_SECONDS, due))
            yield from self._drain()

    def _start(self) -> None:
        """Hand units to the cluster, as far as there is room."""
        self.queue.put_last(self.breaker.probed)
        room = self.config.in_flight(self.watch.places, self.at_once) - len(self.running)
        for unit in self.queue.take_due(self.breaker.room(room, (running.began for running in self.running.values()))):
            avoided = self.nodes.avoid(unit.failed_on, self.watch.able)
            attempt = self.cluster.start(unit.key, unit.work, unit.number, avoided, alone=unit.lost > 1)
            self.running[attempt] = _Running(unit, frozenset(avoided), time.monotonic())

    def _settle(self, attempt: Attempt[Work]) -> Iterator[Done[Result] | Failed | News | UnderWay]:
        """Say what became of an attempt that has ended, and have its unit tried again where that may help."""
        running = self.running.pop(attempt)
        unit = running.unit
        report = self.cluster.last_report(unit.key, unit.number)
        node = report.node if report else None
        try:
            result = self.cluster.result(attempt)
        except Cancelled:
            self.queue.put_back(unit)  # it waited for nodes that are gone
        except Failure as failure:
            if failure.outage is not None:
                yield from self._outage(running, report, failure, failure.outage)
                return
            number = unit.number
            again = unit.fail(failure.is_lost, node, self.config) and not failure.is_final
            if again:
                self.queue.put_back(unit)
            which = unit.last(failure.is_lost, self.config)
            yield self._failed(unit.key, report, which, failure, again, number)
            if not failure.is_final:  # damaged work says nothing of the node
                yield from self._suspect(node)
        else:
            self.nodes.succeeded(node)
            if news := self.breaker.succeeded(node, running.began):
                self.nodes = Nodes(self.config.node_failures)  # what they failed in was the outage
                yield News(news)
            yield Done(unit.key, self.watch.name(node), result)

    def _outage(
        self, running: _Running[Work], report: Reported | None, failure: Failure, outage: Outage
    ) -> Iterator[Done[Result] | Failed | News | UnderWay]:
        """Have a unit tried again at no cost, and pause where most nodes fail so."""
        unit, node = running.unit, report.node if report else None
        number, which, again = unit.number, "an outage, which counts for no attempt", True
        if not unit.spare(self.breaker.went_well, bool(self.breaker.keys - {unit.key}), node, self.config):
            again = unit.fail(True, node, self.config)
            which = unit.last(True, self.config)
        if again:
            self.queue.put_back(unit)
        try:
            news = self.breaker.failed(unit.key, node, self.watch.able, running.began, outage)
        except WorkError:
            yield self._failed(unit.key, report, which, failure, again, number, in_pause=True)
            yield from self._drain()
            raise
        yield self._failed(unit.key, report, which, failure, again, number, in_pause=self.breaker.is_open)
        if news:
            yield News(news)
        elif not self.breaker.is_open:
            yield from self._suspect(node)

    def _failed(
        self, key: str, report: Reported | None, which: str, failure: Failure, again: bool, number: int, **more: bool
    ) -> Failed:
        node, log = (self.watch.name(report.node), report.log) if report else (None, "")
        return Failed(key, node, which, failure, again, number, log=log, **more)

    def _suspect(self, node: str | None) -> Iterator[News]:
        if self.nodes.failed(node):
            name = self.watch.name(node)
            yield News(f"node {name} failed {self.config.node_failures} attempts in a row, and is avoided")

    def _take_back_stranded(self) -> None:
        """Cancel attempts for which every node that they may go to is gone: they would wait for ever."""
        for attempt, running in self.running.items():
            if running.avoided and not self.watch.able - running.avoided:
                self.cluster.cancel(attempt)

    def _drain(self) -> Iterator[Done[Result] | UnderWay]:
        """Interrupt what is under way; what was through meanwhile counts."""
        for attempt in self.cluster.drain(list(self.running)):
            try:
                yield Done(self.running[attempt].unit.key, None, self.cluster.result(attempt))
            except (Cancelled, Failure):
                continue  # the next job's
        yield UnderWay(0, 0, self.breaker.is_open)
