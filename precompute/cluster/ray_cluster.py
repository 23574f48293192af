"""All that is asked of Ray: joining or starting a cluster, attempts as its tasks, and the board they write on."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from precompute.cluster.nodes import Resources, ResourcesConfig, describe, missing
from shards.base.errors import DamagedInput, Outage, RequestError, WorkError, is_storage_error

Work = TypeVar("Work")
Result = TypeVar("Result")
Report = Callable[[int], None]
"""Called in a worker with how much of its unit it has done."""
Function = Callable[[Work, int, Report], Result]
"""What workers do: (unit of work, number of the attempt from 1, report) → result. It goes to them by name or by value,
once."""

TASK_NAME = "attempt"
NODE_ID = "ray.io/node-id"
BOARD_SECONDS = 20.0
REPORT_SECONDS = 2.0
GRACE_SECONDS = 10
CLUSTER_ERRORS = (ray.exceptions.RuntimeEnvSetupError, ray.exceptions.TaskUnschedulableError)
# What a launcher left in the environment makes `streaming` believe that it is one of several ranks.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Cancelled(Exception):
    """The attempt was cancelled before it began, or while it ran."""


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

    Raises:
        RequestError: the cluster cannot be joined, or this machine has not what one worker takes.
    """
    forget_ranks()
    if ray.is_initialized():
        return
    if address := os.environ.get("RAY_ADDRESS"):
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise RequestError(
                f"The Ray cluster at RAY_ADDRESS={address} cannot be joined: {first_line(error)} This machine must be "
                f"a node of it; from another, send the job there with `ray job submit`. If its nodes were started with "
                f"a token, this machine needs the same one: RAY_AUTH_MODE=token, and the token in ~/.ray/auth_token or "
                f"at RAY_AUTH_TOKEN_PATH (docs/how-to/cluster.md)."
            ) from error
        return
    ray.init(
        "local",  # without it, any cluster that runs on this machine
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=256 << 20,  # work goes by name; only small results come back
    )
    here = ray.cluster_resources()
    if missing(here, config.needs):
        raise RequestError(
            f"One worker takes {describe(config.needs)}; this machine has {describe(here, config.needs)}. Set "
            f"workers.num_gpus (0 encodes on the CPU), workers.num_cpus and workers.resources, or join a cluster with "
            f"RAY_ADDRESS."
        )


def forget_ranks() -> None:
    """Undo what a launcher may have left in the environment."""
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)


def first_line(error: Exception) -> str:
    """The first line of an error, or its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else f"{type(error).__name__}."


class RayCluster(Generic[Work, Result]):
    """The cluster that `start_ray` joined or started, for one function: its nodes, its attempts, their reports."""

    def __init__(self, config: ResourcesConfig, function: Function[Work, Result]):
        def attempt(key: str, work: Work, number: int, board: ray.actor.ActorHandle) -> Result:
            """Runs in a Ray worker."""
            forget_ranks()
            return function(work, number, Reporter(board, key, number))

        # A process is kept between tasks (Ray drops a GPU task's after each by default), and with it the models that it
        # has loaded. The fleet counts retries, not Ray.
        self.task = ray.remote(
            num_gpus=config.num_gpus,
            num_cpus=config.num_cpus,
            resources=config.resources,
            max_retries=0,
            max_calls=0,
            scheduling_strategy="SPREAD",
        )(attempt)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.board = ray.remote(Board).options(num_cpus=0, scheduling_strategy=here).remote()
        self.reading = self.board.read.remote()
        self.reports: dict[tuple[str, int], Reported] = {}

    def alive(self) -> dict[str, Resources]:
        """The nodes that are alive, and what each has in all."""
        return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}

    def start(self, key: str, work: Work, number: int, avoid: list[str]) -> ray.ObjectRef:
        """Begin an attempt, on none of the nodes in `avoid`."""
        options = {"label_selector": {NODE_ID: f"!in({','.join(avoid)})"}} if avoid else {}
        return self.task.options(name=TASK_NAME, **options).remote(key, work, number, self.board)

    def ended(self, attempts: list[ray.ObjectRef], seconds: float) -> list[ray.ObjectRef]:
        """Those of the attempts that have ended, once there is one; waits for at most `seconds`."""
        if not attempts:
            return []
        ready: list[ray.ObjectRef] = ray.wait(attempts, num_returns=1, timeout=seconds)[0]
        return ready

    def result(self, attempt: ray.ObjectRef) -> Result:
        """What an attempt that has ended came to.

        Raises:
            Cancelled: it was cancelled.
            Failure: it raised, or went away with its process or node.
        """
        try:
            result: Result = ray.get(attempt)
            return result
        except ray.exceptions.TaskCancelledError:
            raise Cancelled from None
        except ray.exceptions.RayError as error:
            raise failure(error) from None

    def cancel(self, attempt: ray.ObjectRef) -> None:
        """Interrupt an attempt, or take it back where it has not begun."""
        ray.cancel(attempt)

    def drain(self, attempts: list[ray.ObjectRef]) -> list[ray.ObjectRef]:
        """Interrupt attempts and wait until they have tidied up; end those that take too long.

        Returns:
            Those that have ended.
        """
        for force in (False, True):
            pending = ray.wait(attempts, num_returns=len(attempts), timeout=0)[1] if attempts else []
            for attempt in pending:
                ray.cancel(attempt, force=force)
            if pending:
                ray.wait(pending, num_returns=len(pending), timeout=GRACE_SECONDS)
        ended: list[ray.ObjectRef] = ray.wait(attempts, num_returns=len(attempts), timeout=0)[0] if attempts else []
        return ended

    def reported(self, running: set[tuple[str, int]]) -> int:
        """What the running attempts (key, number) have done, as far as is known; never waits."""
        if ray.wait([self.reading], timeout=0)[0]:
            try:
                self.reports = ray.get(self.reading)
            except ray.exceptions.RayError:
                self.reports = {}
            self.reading = self.board.read.remote()
        return sum(report.done for attempt, report in self.reports.items() if attempt in running)

    def node_of(self, key: str, number: int) -> str | None:
        """The node of an attempt that has ended; None where it is not known."""
        try:
            report = ray.get(self.board.take.remote(key, number), timeout=BOARD_SECONDS)
        except ray.exceptions.RayError:
            return None
        return report.node if report else None


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
        is_final=isinstance(cause, DamagedInput),
        line=line,
        text=line if for_people else str(error),
        trace=str(error),
        outage=cause if isinstance(cause, Outage) else Outage(line) if is_cluster or is_storage_error(cause) else None,
    )


@dataclass(frozen=True)
class Reported:
    """What an attempt said last."""

    node: str
    done: int = 0


class Board:
    """An actor on the driver's node. Workers write where they are and how far; the fleet reads."""

    def __init__(self) -> None:
        self.reports: dict[tuple[str, int], Reported] = {}

    def write(self, key: str, number: int, report: Reported) -> None:
        """What the attempt says now."""
        self.reports[key, number] = report

    def read(self) -> dict[tuple[str, int], Reported]:
        """All of it, by key and number of the attempt."""
        return self.reports

    def take(self, key: str, number: int) -> Reported | None:
        """The last report of an attempt that ended."""
        return self.reports.pop((key, number), None)


class Reporter:
    """A worker's end of the board: its node when it begins, and what it has done every few seconds."""

    def __init__(self, board: ray.actor.ActorHandle, key: str, number: int):
        self.board, self.key, self.number = board, key, number
        self.node = ray.get_runtime_context().get_node_id()
        self.written = time.monotonic()
        # known, whatever happens next
        ray.wait([board.write.remote(key, number, Reported(self.node))], timeout=BOARD_SECONDS)

    def __call__(self, done: int) -> None:
        if time.monotonic() - self.written >= REPORT_SECONDS:
            self.written = time.monotonic()
            self.board.write.remote(self.key, self.number, Reported(self.node, done))
