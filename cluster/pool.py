"""Run workers as Ray actors: start them, run attempts on them, and collect results, failures and progress."""

import time
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.actor import Attempt, Function, ProgressBoard, WorkerActor
from cluster.nodes import Resources, ResourcesConfig
from cluster.placement import Worker
from cluster.retry import Unit
from shards.base.durable import DamagedFile
from shards.base.errors import DamagedInput, Outage, RequestError, WorkError, is_storage_error

Work = TypeVar("Work")
Result = TypeVar("Result")
NODE_ID = "ray.io/node-id"
"""Name of the Ray node label that holds the node's id."""
GRACE_SECONDS = 10
"""Seconds that attempts have to clean up when the job stops."""
CLUSTER_ERRORS = (ray.exceptions.RuntimeEnvSetupError, ray.exceptions.ActorUnschedulableError)


@dataclass(eq=False)
class Failure(Exception):
    """Failure of an attempt that raised an exception, or whose process or node died."""

    is_lost: bool
    """Whether the attempt's process or node died."""
    is_final: bool
    """Whether every further attempt would fail in the same way."""
    line: str
    """The cause in one line."""
    text: str
    """Message for the user: `line` for a user-facing error, or the worker's traceback for a bug."""
    trace: str = ""
    """The worker's traceback, for any kind of error."""
    outage: Outage | None = None
    """The outage, if the failure is due to storage, credentials, models or the cluster rather than the work."""


@dataclass(eq=False)
class RunningAttempt(Generic[Work]):
    """An attempt at a unit, running on a worker."""

    unit: Unit[Work]
    number: int
    worker: Worker
    result: Any
    """Object reference to the result of the attempt."""
    began: float
    """Start time, by `time.monotonic`."""


@dataclass(frozen=True)
class StartFailure:
    """A worker that could not start. No unit ran on it."""

    requested_at: float
    """Time of the request for the worker, by `time.monotonic`."""
    failure: Failure


class WorkerPool(Generic[Work, Result]):
    """Workers on the cluster that `start_ray` joined or started, for one job or for several in turn.

    The pool makes no decisions. The fleet determines the number of workers, which unit goes where, and what is retried.
    """

    def __init__(self, config: ResourcesConfig, at_once: int = 1):
        """Prepare the pool without workers. Each worker will run up to `at_once` attempts, one per thread."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.board = ray.remote(ProgressBoard).options(num_cpus=0, scheduling_strategy=here).remote()
        self.function: Any = None
        """Object reference to the function that the workers run."""
        self.actor_class = ray.remote(
            num_gpus=config.num_gpus,
            num_cpus=config.num_cpus,
            resources=config.resources,
            max_concurrency=at_once + 1,  # one more thread for `stop`
            scheduling_strategy="SPREAD",
        )(WorkerActor)
        self.reading = self.board.read.remote(set())
        self.reports: dict[Attempt, int] = {}
        self.workers: list[Worker] = []
        self.running: list[RunningAttempt[Work]] = []

    @property
    def is_idle(self) -> bool:
        """Whether no attempt is running and no worker is starting, so that `wait` would return immediately."""
        return not self.running and all(worker.node is not None for worker in self.workers)

    def alive(self) -> dict[str, Resources]:
        """Return the total resources of each live node. Dismiss idle workers on dead nodes, because their next attempt
        would be lost."""
        alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        for worker in list(self.workers):
            if not worker.running and worker.node is not None and worker.node not in alive:
                self.dismiss(worker)
        return alive

    def use(self, function: Function[Work, Result]) -> None:
        """Set the function for the attempts that start from now on."""
        self.function = ray.put(function)

    def add(self, avoid: frozenset[str]) -> None:
        """Request a worker on a node outside `avoid`. Ray starts it once a node has room."""
        where = {"label_selector": {NODE_ID: f"!in({','.join(sorted(avoid))})"}} if avoid else {}
        actor = self.actor_class.options(**where).remote(self.function, self.board)
        self.workers.append(Worker(actor, actor.place.remote(), time.monotonic()))

    def dismiss(self, worker: Worker) -> None:
        """Kill a worker, or cancel the request for it."""
        if worker in self.workers:
            self.workers.remove(worker)
            ray.kill(worker.actor)

    def start(self, unit: Unit[Work], worker: Worker) -> None:
        """Start an attempt at a unit on the worker that it was assigned to."""
        result = worker.actor.attempt.remote(self.function, unit.key, unit.work, unit.attempt)
        self.running.append(RunningAttempt(unit, unit.attempt, worker, result, time.monotonic()))

    def wait(self, seconds: float) -> list[RunningAttempt[Work] | StartFailure]:
        """Wait at most `seconds` until an attempt ends, or a worker starts or fails to start. Return the attempts that
        ended, and the failed starts."""
        starting = {worker.started: worker for worker in self.workers if worker.node is None}
        attempts = {attempt.result: attempt for attempt in self.running}
        if not starting and not attempts:
            return []
        ready = ray.wait([*attempts, *starting], num_returns=1, timeout=seconds)[0]
        events: list[RunningAttempt[Work] | StartFailure] = [attempts[ref] for ref in ready if ref in attempts]
        for worker in (starting[ref] for ref in ready if ref in starting):
            try:
                worker.node, worker.log = ray.get(worker.started)
            except ray.exceptions.RayError as error:
                self.dismiss(worker)
                events.append(StartFailure(worker.requested_at, describe_failure(error)))
        return events

    def result(self, attempt: RunningAttempt[Work]) -> Result:
        """Return the result of an attempt that has ended, or raise its `Failure`, and free its slot."""
        self.running.remove(attempt)
        attempt.worker.running.remove(attempt.unit)
        try:
            result: Result = ray.get(attempt.result)
            return result
        except ray.exceptions.RayError as error:
            failure = describe_failure(error)
            if failure.is_lost:
                self.dismiss(attempt.worker)
            raise failure from None

    def drain(self) -> list[RunningAttempt[Work]]:
        """Interrupt all attempts, wait until they have cleaned up, and kill the workers. Return the attempts that ended
        in time, to be passed to `result`."""
        results = [attempt.result for attempt in self.running]
        ended: set[Any] = set()
        if results:
            for worker in self.workers:
                worker.actor.stop.remote()
            ray.wait(results, num_returns=len(results), timeout=GRACE_SECONDS)
            ended = set(ray.wait(results, num_returns=len(results), timeout=0)[0])
        for worker in list(self.workers):
            self.dismiss(worker)
        if results:
            # wait for the killed processes to be gone, because only then can the files of their attempts be swept
            ray.wait(results, num_returns=len(results), timeout=GRACE_SECONDS)
        return [attempt for attempt in self.running if attempt.result in ended]

    def reported(self) -> int:
        """Return the total progress of the running attempts, according to the latest reports received. Never blocks."""
        running = {(attempt.unit.key, attempt.number) for attempt in self.running}
        if ray.wait([self.reading], timeout=0)[0]:
            try:
                self.reports = ray.get(self.reading)
            except ray.exceptions.RayError:
                self.reports = {}
            self.reading = self.board.read.remote(running)
        return sum(done for attempt, done in self.reports.items() if attempt in running)


def describe_failure(error: ray.exceptions.RayError) -> Failure:
    """Convert a Ray error to a `Failure`."""
    cause = getattr(error, "cause", None)  # the exception that the worker's function raised, if any
    raised = cause if isinstance(error, ray.exceptions.RayTaskError) and cause else error
    words = str(raised).strip().splitlines()
    line = f"{type(raised).__name__}: {words[-1] if words else '(no message)'}"
    for_people = isinstance(cause, WorkError | RequestError) or is_storage_error(cause)
    is_cluster_error = isinstance(error, CLUSTER_ERRORS)
    outage = None
    if isinstance(cause, Outage):
        outage = cause
    elif is_cluster_error or is_storage_error(cause):
        outage = Outage(line)
    return Failure(
        is_lost=not is_cluster_error and not isinstance(error, ray.exceptions.RayTaskError),
        is_final=isinstance(cause, DamagedInput | DamagedFile),
        line=line,
        text=line if for_people else str(error),
        trace=str(error),
        outage=outage,
    )
