"""A worker's process, and the board to which its attempts report their progress for the fleet to read."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import ray

from cluster.start import forget_ranks
from shards.base.device import choose_device

Work = TypeVar("Work")
Result = TypeVar("Result")
Report = Callable[[int], None]
"""Function that a worker calls with the amount of its unit that is done."""
Function = Callable[[Work, int, Report], Result]
"""Function that workers run: (work, number of the attempt from 1, report) → result. It is pickled once per job."""
BOARD_SECONDS = 20.0
"""Timeout for a call to the board."""
REPORT_SECONDS = 2.0
"""Minimum interval between an attempt's reports."""


class JobStopping(Exception):
    """Raised in an attempt that must end because the job is stopping."""


@dataclass(frozen=True)
class ProgressReport:
    """The last report of an attempt."""

    node: str
    log: str
    """Path of the worker's log on the node."""
    done: int = 0


class ProgressBoard:
    """An actor on the driver's node that holds the last report of each attempt, by its key and number."""

    def __init__(self) -> None:
        self.reports: dict[tuple[str, int], ProgressReport] = {}

    def write(self, key: str, number: int, report: ProgressReport) -> None:
        """Replace the report of an attempt."""
        self.reports[key, number] = report

    def read(self) -> dict[tuple[str, int], ProgressReport]:
        """Return all reports."""
        return self.reports

    def take(self, key: str, number: int) -> ProgressReport | None:
        """Remove and return the last report of an attempt that has ended."""
        return self.reports.pop((key, number), None)


class WorkerActor(Generic[Work, Result]):
    """A worker's process. It keeps its loaded models between attempts, and runs each attempt in a thread."""

    def __init__(self, function: Function[Work, Result], board: ray.actor.ActorHandle):
        forget_ranks()
        self.function, self.board = function, board
        self.stopping = threading.Event()

    def node(self) -> str:
        """Return the id of the node."""
        return str(ray.get_runtime_context().get_node_id())

    def attempt(self, key: str, work: Work, number: int) -> Result:
        """Run an attempt. Its log lines carry its key and number, because attempts share the worker's log."""
        node, path, written = self.node(), worker_log(), time.monotonic()

        def write(done: int) -> ray.ObjectRef:
            return self.board.write.remote(key, number, ProgressReport(node, path, done))

        def report(done: int) -> None:
            nonlocal written
            if self.stopping.is_set():
                raise JobStopping(f"{key}: the job is stopping.")
            if time.monotonic() - written >= REPORT_SECONDS:
                written = time.monotonic()
                write(done)

        def log(text: str) -> None:
            lines = (f"{key}: attempt {number} {line}\n" for line in text.splitlines())
            print("".join(lines), end="", file=sys.stderr, flush=True)

        ray.wait([write(0)], timeout=BOARD_SECONDS)  # so that the node is known even if the process dies immediately
        log("begins")
        try:
            if ray.get_gpu_ids():
                choose_device()  # raises an error if torch cannot use this node's GPU
            result = self.function(work, number, report)
        except BaseException as error:
            log(f"failed: {type(error).__name__}: {error}\n{traceback.format_exc()}")
            raise
        log("is done")
        return result

    def stop(self) -> None:
        """Make all attempts end, each at its next report."""
        self.stopping.set()


def worker_log() -> str:
    """Return the path of the file to which this process's stderr is written; empty if unknown."""
    try:
        return os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
