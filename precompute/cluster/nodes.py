"""The Ray cluster: joining or starting it, what its nodes can take, and the board of what workers are at."""

import logging
import os
import time
from dataclasses import dataclass

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from precompute.config import WorkersConfig
from shards.base.errors import RequestError, WorkError

LOOK_SECONDS = 2.0
REMIND_SECONDS = 30.0
BOARD_SECONDS = 20.0


def start_ray(workers: WorkersConfig) -> None:
    """Join the cluster at RAY_ADDRESS, or start one on this machine that listens to nobody else.

    Raises:
        RequestError: the cluster cannot be joined, or this machine has not what one worker takes.
    """
    if ray.is_initialized():
        return
    if address := os.environ.get("RAY_ADDRESS"):
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise RequestError(
                f"The Ray cluster at RAY_ADDRESS={address} cannot be joined: {first_line(error)} If its nodes were "
                f"started with a token, this machine needs the same one: RAY_AUTH_MODE=token, and the token in "
                f"~/.ray/auth_token or at RAY_AUTH_TOKEN_PATH (docs/how-to/cluster.md)."
            ) from error
        return
    ray.init(
        "local",  # without it, any cluster that runs on this machine
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=256 << 20,  # shards go by name; only receipts come back
    )
    here = ray.cluster_resources()
    if missing(here, workers):
        raise RequestError(
            f"One worker takes {describe(needs(workers))}; this machine has {describe(here, needs(workers))}. Set "
            f"workers.num_gpus (0 encodes on the CPU), workers.num_cpus and workers.resources, or join a cluster with "
            f"RAY_ADDRESS."
        )


def first_line(error: Exception) -> str:
    """The first line of an error, or its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else f"{type(error).__name__}."


def needs(workers: WorkersConfig) -> dict[str, float]:
    """What one worker takes of its node, by Ray's names."""
    return {"GPU": workers.num_gpus, "CPU": workers.num_cpus, **workers.resources}


def missing(has: dict[str, float], workers: WorkersConfig) -> bool:
    """Whether a node with `has` in all could never take a worker."""
    return any(has.get(name, 0) < amount for name, amount in needs(workers).items())


def describe(resources: dict[str, float], wanted: dict[str, float] | None = None) -> str:
    """`1 GPUs and 8 CPUs`: the resources that are wanted, for people."""
    named = [f"{resources.get(name, 0):g} {name}{'s' if name.isupper() else ''}" for name in wanted or resources]
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


class Watch:
    """Looks at the cluster's nodes now and then, and says how long it has had none that can take a worker."""

    def __init__(self, workers: WorkersConfig):
        self.workers = workers
        self.able: set[str] = set()
        """Ids of the nodes that are alive and large enough."""
        self.looked = self.reminded = -float("inf")
        self.able_at = time.monotonic()

    def look(self) -> str | None:
        """Look, at most every two seconds; returns what there is to say.

        Raises:
            WorkError: no node could take a worker for `workers.wait_for_resources` seconds.
        """
        now = time.monotonic()
        if now - self.looked < LOOK_SECONDS:
            return None
        self.looked, alive = now, [node for node in ray.nodes() if node["Alive"]]
        self.able = {node["NodeID"] for node in alive if not missing(node["Resources"], self.workers)}
        if self.able:
            self.able_at, self.reminded = now, -float("inf")
            return None
        waited, limit = now - self.able_at, self.workers.wait_for_resources
        largest = "; ".join(sorted({describe(node["Resources"], needs(self.workers)) for node in alive})) or "none"
        what = f"No node of the cluster can take a worker of {describe(needs(self.workers))} (alive: {largest})"
        if waited > limit:
            raise WorkError(
                f"{what}, and none joined within {limit:g} s (workers.wait_for_resources). Add such a node, or lower "
                f"workers.num_gpus, workers.num_cpus or workers.resources. What was committed stays."
            )
        if now - self.reminded < REMIND_SECONDS:
            return None
        self.reminded = now
        return f"{what}: waiting for one to join, for {limit - waited:.0f} s more"


@dataclass(frozen=True)
class Report:
    """What an attempt said last."""

    node: str
    samples_in: int = 0


class Board:
    """An actor on the driver's node. Workers write where they are and how far; the job reads."""

    def __init__(self) -> None:
        self.reports: dict[tuple[str, int], Report] = {}

    def write(self, shard: str, attempt: int, report: Report) -> None:
        """What the attempt says now."""
        self.reports[shard, attempt] = report

    def read(self) -> dict[tuple[str, int], Report]:
        """All of it, by shard and number of the attempt."""
        return self.reports

    def take(self, shard: str, attempt: int) -> Report | None:
        """The last report of an attempt that ended."""
        return self.reports.pop((shard, attempt), None)


def make_board() -> ray.actor.ActorHandle:
    """The job's board."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Board).options(num_cpus=0, scheduling_strategy=here).remote()


class Reporter:
    """A worker's end of the board: its node when it begins, and its samples every few seconds."""

    def __init__(self, board: ray.actor.ActorHandle | None, shard: str, attempt: int, every: float = 2.0):
        self.board, self.shard, self.attempt, self.every = board, shard, attempt, every
        self.node = ray.get_runtime_context().get_node_id() if board else ""
        self.written = time.monotonic()
        if board:  # known, whatever happens next
            ray.wait([board.write.remote(shard, attempt, Report(self.node))], timeout=BOARD_SECONDS)

    def __call__(self, samples_in: int) -> None:
        if self.board and time.monotonic() - self.written >= self.every:
            self.written = time.monotonic()
            self.board.write.remote(self.shard, self.attempt, Report(self.node, samples_in))


class Reader:
    """The job's end of the board, which never makes it wait for long."""

    def __init__(self, board: ray.actor.ActorHandle):
        self.board = board
        self.pending = board.read.remote()
        self.latest: dict[tuple[str, int], Report] = {}

    def samples_in(self, running: set[tuple[str, int]]) -> int:
        """Samples that the running attempts have taken in, as far as is known."""
        if ray.wait([self.pending], timeout=0)[0]:
            try:
                self.latest = ray.get(self.pending)
            except ray.exceptions.RayError:
                self.latest = {}
            self.pending = self.board.read.remote()
        return sum(report.samples_in for key, report in self.latest.items() if key in running)

    def node_of(self, shard: str, attempt: int) -> str | None:
        """The node of an attempt that ended; None where it is not known."""
        try:
            report = ray.get(self.board.take.remote(shard, attempt), timeout=BOARD_SECONDS)
        except ray.exceptions.RayError:
            return None
        return report.node if report else None
