"""All that is asked of Ray: joining or starting a cluster, workers as its actors, and attempts as their calls."""

import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from precompute.cluster.board import BOARD_SECONDS, Board, Reported, Reporter
from precompute.cluster.hands import Attempt, Worker, assign, surplus, wanted
from precompute.cluster.nodes import Resources, ResourcesConfig, describe, missing
from shards.base.device import Precision, PrecisionOption, resolve_precision, worker_device
from shards.base.durable import DamagedFile
from shards.base.errors import DamagedInput, Outage, Preempted, RequestError, WorkError, is_storage_error, say
from shards.base.stop import exit_on_stop_signal

Work = TypeVar("Work")
Result = TypeVar("Result")
Report = Callable[[int], None]
"""Called in a worker with how much of its unit it has done."""
Function = Callable[[Work, int, Report], Result]
"""What workers do: (unit of work, number of the attempt from 1, report) → result. It goes to them by name or by value,
once."""

NODE_ID = "ray.io/node-id"
GRACE_SECONDS = 10
TOLD_TO_LEAVE = "told to leave. What is committed stays; the same command again goes on."
CLUSTER_ERRORS = (ray.exceptions.RuntimeEnvSetupError, ray.exceptions.ActorUnschedulableError)
# What a launcher left in the environment makes `streaming` believe that it is one of several ranks.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Cancelled(Exception):
    """The attempt was cancelled before it began."""


@dataclass(eq=False)
class Failure(Exception):
    """An attempt raised, or its process or node went away."""

    is_lost: bool
    """Its process or node went away."""
    is_final: bool
    """Another attempt would find the same."""
    line: str
    """The cause in a line."""
    text: str
    """For a person: the line where it is an error for people, the worker's traceback where it is a bug."""
    trace: str = ""
    """The worker's traceback, whatever it is."""
    outage: Outage | None = None
    """Where storage, credentials, models or the cluster failed, and not the work."""


def start_ray(config: ResourcesConfig) -> None:
    """Join the cluster at RAY_ADDRESS, or start one on this machine that listens to nobody else.

    From then on this process leaves with code 75 when it is told to, but where a fleet listens itself.

    Raises:
        RequestError: the cluster cannot be joined, or this machine has not what one worker takes.
        WorkError: Ray does not start here.
    """
    forget_ranks()
    if ray.is_initialized():
        return
    if address := os.environ.get("RAY_ADDRESS"):
        try:
            _init()
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise RequestError(
                f"The Ray cluster at RAY_ADDRESS={address} cannot be joined: {first_line(error)} This machine must be "
                f"a node of it; from another, send the job there with `ray job submit`. If its nodes were started with "
                f"a token, this machine needs the same one: RAY_AUTH_MODE=token, and the token in ~/.ray/auth_token or "
                f"at RAY_AUTH_TOKEN_PATH (docs/how-to/cluster.md)."
            ) from error
        return
    try:
        _init(
            address="local",  # without it, any cluster that runs on this machine
            include_dashboard=False,
            object_store_memory=256 << 20,  # work goes by name; only small results come back
        )
    except Exception as error:  # Ray raises that very type where it waited in vain
        raise WorkError(
            f"Ray did not start on this machine: {first_line(error)} A machine that is busy, or short of memory or "
            f"of room in /tmp, is the likeliest cause; Ray's own logs are in /tmp/ray/session_latest/logs. Give the "
            f"same command again."
        ) from error
    here = ray.cluster_resources()
    if missing(here, config.needs):
        raise RequestError(
            f"One worker takes {describe(config.needs)}; this machine has {describe(here, config.needs)}. Set "
            f"workers.num_gpus (0 encodes on the CPU), workers.num_cpus and workers.resources, or join a cluster with "
            f"RAY_ADDRESS."
        )


def precision_on_worker(asked: PrecisionOption, config: ResourcesConfig) -> Precision:
    """Resolve a precision on the device that a worker would have: on this machine, or in a task on the cluster.

    A given precision is warned about on this machine alone: a task on the cluster would delay every job for it.

    Raises:
        RequestError, WorkError: as `start_ray`; or no node of the cluster could take a worker.
    """
    if not config.num_gpus and not os.environ.get("RAY_ADDRESS"):
        return resolve_precision(asked, "cpu")
    if asked != "auto":
        return asked
    start_ray(config)
    task = ray.remote(num_gpus=config.num_gpus, num_cpus=config.num_cpus, resources=config.resources)(_resolve)
    try:
        precision, lines = ray.get(
            task.remote(asked, worker_device(config.num_gpus)), timeout=config.wait_for_resources
        )
    except ray.exceptions.GetTimeoutError as error:
        raise WorkError(
            f"precision {asked} is resolved on a worker, but no node of the cluster could take one of "
            f"{describe(config.needs)} within {config.wait_for_resources:g} s (workers.wait_for_resources). Add such a "
            f"node, or give the precision itself: `--precision bfloat16`."
        ) from error
    for line in lines:
        print(line, file=sys.stderr, flush=True)
    return precision


def _resolve(asked: PrecisionOption, device: str) -> tuple[Precision, list[str]]:
    forget_ranks()
    lines: list[str] = []
    return resolve_precision(asked, device, lines.append), lines


def _init(**options: Any) -> None:
    """`ray.init`, which has SIGTERM end the process with code 15 and without a word."""
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except SystemExit:
        say(Preempted(TOLD_TO_LEAVE))
        sys.exit(Preempted.exit_code)
    exit_on_stop_signal(TOLD_TO_LEAVE)


def forget_ranks() -> None:
    """Undo what a launcher may have left in the environment."""
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)


def first_line(error: Exception) -> str:
    """The first line of an error, or its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else f"{type(error).__name__}."


class Hands(Generic[Work, Result]):
    """A worker's process, as an actor: it keeps what it has loaded, and makes attempts in threads."""

    def __init__(self, function: Function[Work, Result], board: ray.actor.ActorHandle):
        forget_ranks()
        self.function, self.board = function, board
        self.leaving = threading.Event()

    def node(self) -> str:
        """Where it is."""
        return str(ray.get_runtime_context().get_node_id())

    def attempt(self, key: str, work: Work, number: int) -> Result:
        """Make one. The worker's log has its lines, each with key and number in front: others are in hand, too."""
        report = Reporter(self.board, key, number, self.leaving)

        def tell(text: str) -> None:
            lines = (f"{key}: attempt {number} {line}\n" for line in text.splitlines())
            print("".join(lines), end="", file=sys.stderr, flush=True)

        tell("begins")
        try:
            result = self.function(work, number, report)
        except BaseException as error:
            tell(f"failed: {type(error).__name__}: {error}\n{traceback.format_exc()}")
            raise
        tell("is done")
        return result

    def leave(self) -> None:
        """Have attempts give up, each at its next report."""
        self.leaving.set()


class RayCluster(Generic[Work, Result]):
    """The cluster that `start_ray` joined or started, for one function: its nodes, its attempts, their reports.

    Attempts wait here, until a worker has a hand free. The fleet counts retries, not Ray.
    """

    def __init__(self, config: ResourcesConfig, function: Function[Work, Result], at_once: int = 1):
        """`at_once`: attempts that a worker has in hand, each in a thread of its own."""
        self.at_once = at_once
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.board = ray.remote(Board).options(num_cpus=0, scheduling_strategy=here).remote()
        self.function = ray.put(function)
        self.hands = ray.remote(
            num_gpus=config.num_gpus,
            num_cpus=config.num_cpus,
            resources=config.resources,
            max_concurrency=at_once + 1,  # and to be told to leave
            scheduling_strategy="SPREAD",
        )(Hands)
        self.reading = self.board.read.remote()
        self.reports: dict[tuple[str, int], Reported] = {}
        self.places, self.most = 0, 1
        self.workers: list[Worker] = []
        self.waiting: deque[Attempt[Work]] = deque()
        self.running: dict[ray.ObjectRef, Attempt[Work]] = {}

    def alive(self) -> dict[str, Resources]:
        """The nodes that are alive, and what each has in all."""
        alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        for worker in [worker for worker in self.workers if not worker.in_hand]:
            if worker.node and worker.node not in alive:
                self._dismiss(worker)  # or the next attempt would be lost with it
        return alive

    def hold(self, places: int, most: int) -> None:
        """Have a worker on each of the cluster's `places`, and ask for up to `most`, for which an autoscaler may add
        nodes; as far as there is work."""
        self.places, self.most = places, most

    def start(self, key: str, work: Work, number: int, avoid: list[str], alone: bool = False) -> Attempt[Work]:
        """Begin an attempt as soon as there is a worker for it, on none of the nodes in `avoid`; `alone`: one that has
        nothing else in hand meanwhile."""
        attempt = Attempt(key, work, number, frozenset(avoid), alone)
        self.waiting.append(attempt)
        return attempt

    def ended(self, attempts: list[Attempt[Work]], seconds: float) -> list[Attempt[Work]]:
        """Those of the attempts that have ended, once there is one; waits for at most `seconds`."""
        until = time.monotonic() + seconds
        while attempts:
            self._man()
            if cancelled := [attempt for attempt in attempts if attempt.cancelled]:
                return cancelled
            coming = {worker.arrival: worker for worker in self.workers if worker.node is None}
            left = max(0.0, until - time.monotonic())
            ready = ray.wait([*self.running, *coming], num_returns=1, timeout=left)[0]
            for arrival in (ref for ref in ready if ref in coming):
                self._arrived(coming[arrival])
            found = [self.running[ref] for ref in ready if ref in self.running]
            if found or not ready:
                return found
        return []

    def _man(self) -> None:
        """See to it that there are workers, and that they have their hands full."""
        for worker in surplus(self.waiting, len(self.running), self.workers):
            self._dismiss(worker)
        for avoid in wanted(self.waiting, len(self.running), self.workers, self.most):
            where = {"label_selector": {NODE_ID: f"!in({','.join(sorted(avoid))})"}} if avoid else {}
            actor = self.hands.options(**where).remote(self.function, self.board)
            self.workers.append(Worker(actor, actor.node.remote()))
        for attempt, worker in assign(self.waiting, self.workers, self.at_once, self.places):
            outcome = worker.actor.attempt.remote(attempt.key, attempt.work, attempt.number)
            attempt.outcome = outcome
            self.running[outcome] = attempt

    def _arrived(self, worker: Worker) -> None:
        """A worker has begun; or it cannot, and an attempt that waits has met that."""
        try:
            worker.node = ray.get(worker.arrival)
        except ray.exceptions.RayError:
            self._dismiss(worker)
            if self.waiting:
                attempt = self.waiting.popleft()
                attempt.outcome = worker.arrival
                self.running[worker.arrival] = attempt

    def _dismiss(self, worker: Worker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
            ray.kill(worker.actor)

    def result(self, attempt: Attempt[Work]) -> Result:
        """What an attempt that has ended came to.

        Raises:
            Cancelled: it was cancelled.
            Failure: it raised, or went away with its process or node.
        """
        if attempt.cancelled:
            raise Cancelled
        self.running.pop(attempt.outcome)
        if attempt.worker:
            attempt.worker.in_hand -= 1
        try:
            result: Result = ray.get(attempt.outcome)
            return result
        except ray.exceptions.RayError as error:
            found = failure(error)
            if attempt.worker is None:  # it waited, and is not to pay for a node on which nothing can start
                found.outage = found.outage or Outage(f"a worker could not start: {found.line}")
            elif found.is_lost:
                self._dismiss(attempt.worker)
            raise found from None

    def cancel(self, attempt: Attempt[Work]) -> None:
        """Take an attempt back that waits for a worker."""
        if attempt in self.waiting:
            self.waiting.remove(attempt)
            attempt.cancelled = True

    def drain(self, attempts: list[Attempt[Work]]) -> list[Attempt[Work]]:
        """Interrupt attempts and wait until they have tidied up; end those that take too long, and all workers.

        Returns:
            Those that have ended.
        """
        self.waiting.clear()
        begun = list(self.running)
        for worker in self.workers if begun else []:
            worker.actor.leave.remote()
        if begun:
            ray.wait(begun, num_returns=len(begun), timeout=GRACE_SECONDS)
        ended = set(ray.wait(begun, num_returns=len(begun), timeout=0)[0]) if begun else set()
        for worker in list(self.workers):
            self._dismiss(worker)
        if begun:
            ray.wait(
                begun, num_returns=len(begun), timeout=GRACE_SECONDS
            )  # what they leave is swept once they are gone
        return [attempt for attempt in attempts if attempt.outcome in ended]

    def reported(self, running: set[tuple[str, int]]) -> int:
        """What the running attempts (key, number) have done, as far as is known; never waits."""
        if ray.wait([self.reading], timeout=0)[0]:
            try:
                self.reports = ray.get(self.reading)
            except ray.exceptions.RayError:
                self.reports = {}
            self.reading = self.board.read.remote()
        return sum(report.done for attempt, report in self.reports.items() if attempt in running)

    def last_report(self, key: str, number: int) -> Reported | None:
        """Of an attempt that has ended; None where it is not known."""
        try:
            report: Reported | None = ray.get(self.board.take.remote(key, number), timeout=BOARD_SECONDS)
            return report
        except ray.exceptions.RayError:
            return None


def failure(error: ray.exceptions.RayError) -> Failure:
    """Ray's error in the fleet's words."""
    cause = getattr(error, "cause", None)  # what was raised in the task, where something was
    raised = cause if isinstance(error, ray.exceptions.RayTaskError) and cause else error
    words = str(raised).strip().splitlines()
    line = f"{type(raised).__name__}: {words[-1] if words else '(no message)'}"
    for_people = isinstance(cause, WorkError | RequestError) or is_storage_error(cause)
    is_cluster = isinstance(error, CLUSTER_ERRORS)
    return Failure(
        is_lost=not is_cluster and not isinstance(error, ray.exceptions.RayTaskError),
        is_final=isinstance(cause, DamagedInput | DamagedFile),
        line=line,
        text=line if for_people else str(error),
        trace=str(error),
        outage=cause if isinstance(cause, Outage) else Outage(line) if is_cluster or is_storage_error(cause) else None,
    )
