"""A fleet of Ray workers that processes keyed units of work. Failed units are retried and never stop the others.

    fleet = Fleet(config, function, units)
    for event in fleet:
        ledger.record(event)

The fleet knows nothing about the work itself.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from pydantic import field_validator

from cluster.actor import Function
from cluster.breaker import Breaker, OutageConfig
from cluster.nodes import NodeWatch, ResourcesConfig
from cluster.placement import Worker, assign, missing_workers, surplus_workers
from cluster.pool import Failure, RunningAttempt, StartFailure, WorkerPool
from cluster.retry import NodeHealth, RetryConfig, Unit, UnitQueue
from shards.base.errors import Outage, WorkError
from shards.base.stop import StopSignal

Work = TypeVar("Work")
Result = TypeVar("Result")
POLL_SECONDS = 1.0
MIN_IN_FLIGHT = 8
"""Minimum number of units in flight, even on a cluster without nodes, because an autoscaler adds nodes only if workers
are waiting for them."""
NOT_COUNTED = "an attempt failed because of an outage and is not counted"


class FleetConfig(RetryConfig, OutageConfig, ResourcesConfig):
    """Resources per worker, and limits on retries and outages."""

    max_in_flight: int | Literal["auto"] = "auto"
    """Maximum number of units of work that run or wait for a worker. `auto` follows the size of the cluster: as many
    units as its workers can run at once, plus one per worker."""

    @field_validator("max_in_flight")
    @classmethod
    def _at_least_one(cls, given: int | str) -> int | str:
        if isinstance(given, int) and given < 1:
            raise ValueError("must be at least 1, or auto")
        return given

    def in_flight(self, places: int, at_once: int = 1) -> int:
        """Return the limit on units in flight for a cluster with room for `places` workers that run `at_once` units
        each."""
        return max(MIN_IN_FLIGHT, (at_once + 1) * places) if self.max_in_flight == "auto" else self.max_in_flight


@dataclass(frozen=True)
class Done(Generic[Result]):
    """A unit that was completed."""

    key: str
    node: str | None
    """Address of the node."""
    result: Result


@dataclass(frozen=True)
class Failed:
    """A failed attempt at a unit."""

    key: str
    node: str | None
    """Address of the node."""
    which: str
    """Description of the attempt, such as `attempt 2 of 3 failed`."""
    failure: Failure
    again: bool
    """Whether the unit will be tried again."""
    number: int = 1
    """Number of the attempt."""
    in_pause: bool = False
    """Whether the job is paused because of this outage. A separate `News` event reports the pause."""
    log: str = ""
    """Path of the worker's log on the node."""


@dataclass(frozen=True)
class News:
    """A message about the cluster for the user."""

    text: str


@dataclass(frozen=True)
class UnderWay:
    """The job's current state, sent about once a second, whenever attempts have ended, and when the job ends."""

    attempts: int
    """Number of units that run or wait for a worker."""
    reported: int
    """Sum of the progress that the running attempts have reported."""
    paused: bool = False
    """Whether the job is waiting for an outage to end."""


Event = Done[Result] | Failed | News | UnderWay


class Fleet(Generic[Work, Result]):
    """Units of work and the workers that run them, on the cluster that `start_ray` joined or started. Iterating over
    the fleet, which is possible only once, runs the units and yields events.

    Iteration ends when every unit is done or has failed for good. On a stop signal (`shards.base.stop`), the fleet
    interrupts the running attempts, and iteration ends with the results of those that had already finished.

    Raises:
        WorkError: no node could take a worker for `wait_for_resources` seconds, or `outage_probes` consecutive attempts
            failed because of an outage.
    """

    def __init__(
        self,
        config: FleetConfig,
        function: Function[Work, Result],
        units: Iterable[tuple[str, Work]],
        at_once: int = 1,
        pool: WorkerPool[Work, Result] | None = None,
    ):
        """Prepare a fleet for `units`, which are pairs of (key, work). A unit is read only once there is room for it.

        Args:
            at_once: number of units that each worker runs at a time, one per thread.
            pool: workers of an earlier job to use, and to keep for the next one; None: start workers for this job.
        """
        self.config, self.at_once = config, at_once
        self.keeps_workers = pool is not None
        self.pool = pool or WorkerPool(config, at_once)
        self.pool.use(function)
        self.queue = UnitQueue(units)
        self.watch, self.health, self.breaker = NodeWatch(config), NodeHealth(config.node_failures), Breaker(config)

    def __iter__(self) -> Iterator[Event[Result]]:
        with StopSignal() as stop:  # after ray.init, which installs its own SIGTERM handler
            while (self.queue or self.pool.running) and not stop.received:
                if self.watch.is_due and (news := self.watch.look(self.pool.alive())):
                    yield News(news)
                num_waiting = self._start_attempts()
                for event in self.pool.wait(POLL_SECONDS):
                    if isinstance(event, StartFailure):
                        yield from self._settle_start_failure(event)
                    else:
                        yield from self._settle(event)
                in_flight = len(self.pool.running) + num_waiting
                yield UnderWay(in_flight, self.pool.reported(), self.breaker.is_open)
                if self.pool.is_idle:
                    is_waiting = self.breaker.is_open or num_waiting > 0
                    time.sleep(POLL_SECONDS if is_waiting else min(POLL_SECONDS, self.queue.seconds_until_due()))
            if stop.received or not self.keeps_workers:
                yield from self._drain()
            else:
                yield UnderWay(0, 0)

    def _start_attempts(self) -> int:
        """Adjust the number of workers, and give units to workers with a free slot. Return the number of units that
        could start but are waiting for a worker."""
        self.queue.move_to_end(self.breaker.probed)
        room = self.config.in_flight(self.watch.places, self.at_once) - len(self.pool.running)
        units = self.queue.due(self.breaker.allowed(room, (attempt.began for attempt in self.pool.running)))
        can_start = any(worker.node is not None and worker.has_slot(self.at_once) for worker in self.pool.workers)
        failed_on = {unit: unit.avoided_node() if can_start else unit.failed_on for unit in units}
        avoided = {node: self.health.avoid(node, self.watch.able) for node in set(failed_on.values())}

        def avoided_by(unit: Unit[Work]) -> frozenset[str]:
            return avoided[failed_on[unit]]

        workers, num_running = self.pool.workers, len(self.pool.running)
        for worker in surplus_workers(units, num_running, workers, avoided_by):
            self.pool.dismiss(worker)
        # request more workers than fit on the cluster now, so that an autoscaler adds nodes
        most = self.config.in_flight(self.watch.places)
        for avoid in missing_workers(units, num_running, workers, most, avoided_by):
            self.pool.add(avoid)
        num_waiting = len(units)
        for unit, worker in assign(units, workers, self.at_once, self.watch.places, avoided_by):
            self.queue.remove(unit)
            self.pool.start(unit, worker)
            num_waiting -= 1
        return num_waiting

    def _settle(self, attempt: RunningAttempt[Work]) -> Iterator[Event[Result]]:
        """Report an attempt that has ended, and requeue its unit if a retry may help."""
        unit, number, worker = attempt.unit, attempt.number, attempt.worker
        node = worker.node
        try:
            result = self.pool.result(attempt)
        except Failure as failure:
            if failure.outage is not None:
                yield from self._settle_outage(unit, attempt.began, worker, failure, failure.outage)
                return
            again = unit.record_failure(failure.is_lost, node, self.config) and not failure.is_final
            if again:
                self.queue.put_back(unit)
            which = unit.describe_failure(failure.is_lost, self.config)
            yield self._failed(unit.key, worker, which, failure, again, number)
            if not failure.is_final:  # a damaged input is not the node's fault
                yield from self._blame(node)
        else:
            self.health.record_success(node)
            if news := self.breaker.record_success(node, attempt.began):
                self.health = NodeHealth(self.config.node_failures)  # earlier failures were due to the outage
                yield News(news)
            yield Done(unit.key, self.watch.address(node), result)

    def _settle_start_failure(self, event: StartFailure) -> Iterator[Event[Result]]:
        """Treat a worker that could not start as an outage that hit the next unit in the queue."""
        for unit in self.queue.due(1):
            self.queue.remove(unit)
            failure = event.failure
            failure.outage = failure.outage or Outage(f"a worker could not start: {failure.line}")
            yield from self._settle_outage(unit, event.requested_at, None, failure, failure.outage)

    def _settle_outage(
        self, unit: Unit[Work], began: float, worker: Worker | None, failure: Failure, outage: Outage
    ) -> Iterator[Event[Result]]:
        """Requeue a unit after an outage, normally without counting the attempt. Pause if most nodes fail, or if no
        worker can start."""
        node = worker.node if worker else None
        number, which, again = unit.attempt, NOT_COUNTED, True
        others_affected = bool(self.breaker.affected - {unit.key})
        if not unit.excuse_outage(self.breaker.last_success, others_affected, node, self.config):
            again = unit.record_failure(True, node, self.config)
            which = unit.describe_failure(True, self.config)
        if again:
            self.queue.put_back(unit)
        # a failed start does not tell its node; if no worker runs anywhere, all nodes may be failing
        has_workers = any(started.node is not None for started in self.pool.workers)
        able = self.watch.able if has_workers else ()
        try:
            news = self.breaker.record_outage(unit.key, node, able, began, outage)
        except WorkError:
            yield self._failed(unit.key, worker, which, failure, again, number, in_pause=True)
            yield from self._drain()
            raise
        yield self._failed(unit.key, worker, which, failure, again, number, in_pause=self.breaker.is_open)
        if news:
            yield News(news)
        elif not self.breaker.is_open:
            yield from self._blame(node)

    def _failed(
        self,
        key: str,
        worker: Worker | None,
        which: str,
        failure: Failure,
        again: bool,
        number: int,
        in_pause: bool = False,
    ) -> Failed:
        node, log = (self.watch.address(worker.node), worker.log) if worker else (None, "")
        return Failed(key, node, which, failure, again, number, in_pause, log)

    def _blame(self, node: str | None) -> Iterator[News]:
        """Count a failure on a node, and report the node if it is now suspended."""
        if self.health.record_failure(node):
            most, address = self.config.node_failures, self.watch.address(node)
            attempts = "1 attempt" if most == 1 else f"{most} attempts in a row"
            yield News(f"{attempts} failed on node {address}, so the job will prefer other nodes for ten minutes")

    def _drain(self) -> Iterator[Done[Result] | UnderWay]:
        """Interrupt the running attempts, and report the results of those that had finished."""
        for attempt in self.pool.drain():
            try:
                yield Done(attempt.unit.key, self.watch.address(attempt.worker.node), self.pool.result(attempt))
            except Failure:
                continue  # the next job retries this unit
        yield UnderWay(0, 0, self.breaker.is_open)
