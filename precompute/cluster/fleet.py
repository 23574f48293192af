"""Keyed units of work onto Ray workers, each retried where it fails, none able to stop the others.

    fleet = Fleet(config, function, units)
    for event in fleet:
        ledger.record(event)

It knows nothing of what the work is.
"""

import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import ray
from pydantic import Field

from precompute.cluster.attempts import Attempts, Nodes, Queue, RetryConfig
from precompute.cluster.nodes import ResourcesConfig, Watch
from precompute.cluster.ray_cluster import Cancelled, Failure, Function, RayCluster
from shards.base.stop import StopSignal

Work = TypeVar("Work")
Result = TypeVar("Result")
POLL_SECONDS = 1.0


class FleetConfig(RetryConfig, ResourcesConfig):
    """What a worker takes of the cluster, and how often what failed is tried again."""

    max_in_flight: int = Field(256, ge=1)
    """Units of work handed to Ray at a time; at least as many as there are workers."""


@dataclass(frozen=True)
class Done(Generic[Result]):
    """An attempt at a unit came to a result."""

    key: str
    node: str | None
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


@dataclass(frozen=True)
class News:
    """What people should hear of the cluster."""

    text: str


@dataclass(frozen=True)
class UnderWay:
    """About once a second: how many attempts were handed to Ray and have not ended, and what they report in all."""

    attempts: int
    reported: int


@dataclass(frozen=True)
class _Running(Generic[Work]):
    unit: Attempts[Work]
    avoided: frozenset[str]
    """Nodes that this attempt may not go to."""


class Fleet(Generic[Work, Result]):
    """Attempts at units of work on the Ray cluster that `start_ray` joined or started; iterate over it once.

    It ends when each unit is done or has failed for good. On SIGTERM, SIGUSR1 or SIGINT it interrupts the attempts that
    are under way, and ends with the results of those that were through by then.

    Raises:
        WorkError: no node of the cluster could take a worker for `wait_for_resources` seconds.
    """

    def __init__(self, config: FleetConfig, function: Function[Work, Result], units: Iterable[tuple[str, Work]]):
        """`units`: key and work of each; as many as there is room for are asked for at a time."""
        self.config = config
        self.cluster = RayCluster(config, function)
        self.queue = Queue(units)
        self.watch, self.nodes = Watch(config), Nodes(config.node_failures)
        self.running: dict[ray.ObjectRef, _Running[Work]] = {}

    def __iter__(self) -> Iterator[Done[Result] | Failed | News | UnderWay]:
        with StopSignal(signal.SIGINT) as stop:  # after ray.init, which listens to SIGTERM itself
            while (self.queue or self.running) and not stop.received:
                if self.watch.is_due and (news := self.watch.look(self.cluster.alive())):
                    yield News(news)
                self._start()
                for attempt in self.cluster.ended(list(self.running), POLL_SECONDS):
                    yield from self._settle(attempt)
                self._take_back_stranded()
                at_work = {(running.unit.key, running.unit.number) for running in self.running.values()}
                yield UnderWay(len(self.running), self.cluster.reported(at_work))
                if not self.running:
                    time.sleep(min(POLL_SECONDS, self.queue.seconds_until_due()))
            yield from self._drain()

    def _start(self) -> None:
        """Hand units to Ray, as far as there is room."""
        for unit in self.queue.take_due(self.config.max_in_flight - len(self.running)):
            avoided = self.nodes.avoid(unit.failed_on, self.watch.able)
            attempt = self.cluster.start(unit.key, unit.work, unit.number, avoided)
            self.running[attempt] = _Running(unit, frozenset(avoided))

    def _settle(self, attempt: ray.ObjectRef) -> Iterator[Done[Result] | Failed | News]:
        """Say what became of an attempt that has ended, and have its unit tried again where that may help."""
        unit = self.running.pop(attempt).unit
        node = self.cluster.node_of(unit.key, unit.number)
        try:
            result = self.cluster.result(attempt)
        except Cancelled:
            self.queue.put_back(unit)  # it waited for nodes that are gone
        except Failure as failure:
            again = unit.fail(failure.is_lost, node, self.config) and not failure.is_final
            if again:
                self.queue.put_back(unit)
            yield Failed(unit.key, node, unit.last(failure.is_lost, self.config), failure, again)
            if not failure.is_final and self.nodes.failed(node):  # damaged work says nothing of the node
                yield News(f"node {node} failed {self.config.node_failures} attempts in a row, and is avoided")
        else:
            self.nodes.succeeded(node)
            yield Done(unit.key, node, result)

    def _take_back_stranded(self) -> None:
        """Cancel attempts for which every node that they may go to is gone: they would wait for ever."""
        for attempt, running in self.running.items():
            if running.avoided and not self.watch.able - running.avoided:
                self.cluster.cancel(attempt)

    def _drain(self) -> Iterator[Done[Result]]:
        """Interrupt what is under way; what was through meanwhile counts."""
        for attempt in self.cluster.drain(list(self.running)):
            try:
                yield Done(self.running[attempt].unit.key, None, self.cluster.result(attempt))
            except (Cancelled, Failure):
                continue  # the next job's
