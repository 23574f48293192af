"""Progress reports: workers write them to a board on the driver's node, and the fleet reads them there."""

import os
import threading
import time
from dataclasses import dataclass

import ray

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
    """An actor on the driver's node that holds the last report of each attempt."""

    def __init__(self) -> None:
        self.reports: dict[tuple[str, int], ProgressReport] = {}

    def write(self, key: str, number: int, report: ProgressReport) -> None:
        """Replace the report of an attempt."""
        self.reports[key, number] = report

    def read(self) -> dict[tuple[str, int], ProgressReport]:
        """Return all reports by the key and number of the attempt."""
        return self.reports

    def take(self, key: str, number: int) -> ProgressReport | None:
        """Remove and return the last report of an attempt that has ended."""
        return self.reports.pop((key, number), None)


class ProgressReporter:
    """Reports one attempt to the board: its node when it starts, then its progress every few seconds."""

    def __init__(self, board: ray.actor.ActorHandle, key: str, number: int, stopping: threading.Event):
        self.board, self.key, self.number, self.stopping = board, key, number, stopping
        self.node = ray.get_runtime_context().get_node_id()
        self.log = worker_log()
        self.written = time.monotonic()
        # wait for this report, so that the node is known even if the process dies immediately
        ray.wait([board.write.remote(key, number, ProgressReport(self.node, self.log))], timeout=BOARD_SECONDS)

    def __call__(self, done: int) -> None:
        """Report `done` if a report is due.

        Raises:
            JobStopping: the job is being stopped.
        """
        if self.stopping.is_set():
            raise JobStopping(f"{self.key}: the job is stopping.")
        if time.monotonic() - self.written >= REPORT_SECONDS:
            self.written = time.monotonic()
            self.board.write.remote(self.key, self.number, ProgressReport(self.node, self.log, done))


def worker_log() -> str:
    """Return the path of the file to which this process's stderr is written; empty if unknown."""
    try:
        return os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
