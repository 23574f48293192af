"""The Ray actor behind each worker, and the board on which attempts report their progress to the fleet."""

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
"""Function that the work calls to report its progress, as the amount done so far."""
Function = Callable[[Work, int, Report], Result]
"""Function that workers run: (work, attempt number counted from 1, report) → result. It is pickled once per job."""
BOARD_SECONDS = 20.0
"""Timeout for a call to the board."""
REPORT_SECONDS = 2.0
"""Minimum interval between an attempt's reports."""


class JobStopping(Exception):
    """Exception that ends an attempt because the job is stopping."""


@dataclass(frozen=True)
class ProgressReport:
    """The latest progress report from an attempt."""

    node: str
    log: str
    """Path of the worker's log on the node."""
    done: int = 0


class ProgressBoard:
    """Actor on the driver's node that holds the latest report from each attempt, by unit key and attempt number."""

    def __init__(self) -> None:
        self.reports: dict[tuple[str, int], ProgressReport] = {}

    def write(self, key: str, number: int, report: ProgressReport) -> None:
        """Store an attempt's latest report, replacing the previous one."""
        self.reports[key, number] = report

    def read(self) -> dict[tuple[str, int], ProgressReport]:
        """Return the latest reports, keyed by unit key and attempt number."""
        return self.reports

    def take(self, key: str, number: int) -> ProgressReport | None:
        """Remove and return the last report from an attempt that has ended, or return None if there is none."""
        return self.reports.pop((key, number), None)


class WorkerActor(Generic[Work, Result]):
    """Ray actor for one worker process. It runs each attempt in a thread, and keeps loaded models between attempts."""

    def __init__(self, function: Function[Work, Result], board: ray.actor.ActorHandle):
        """Prepare the worker.

        Args:
            function: only loaded here, so that a process without the necessary modules counts as one that cannot start.
        """
        forget_ranks()
        self.board = board
        self.stopping = threading.Event()

    def node(self) -> str:
        """Return the id of the node on which this worker runs."""
        return str(ray.get_runtime_context().get_node_id())

    def attempt(self, function: Function[Work, Result], key: str, work: Work, number: int) -> Result:
        """Run an attempt and return its result. Each log line starts with the unit's key and the attempt's number,
        because all attempts on a worker share its log."""
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
            result = function(work, number, report)
        except BaseException as error:
            log(f"failed: {type(error).__name__}: {error}\n{traceback.format_exc()}")
            raise
        log("is done")
        return result

    def stop(self) -> None:
        """Stop all running attempts. Each one ends when it next reports its progress."""
        self.stopping.set()


def worker_log() -> str:
    """Return the path of the file to which this process's stderr is written, or an empty string if it is unknown."""
    try:
        return os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
