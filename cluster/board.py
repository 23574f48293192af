"""How far attempts are: workers write it on a board on the driver's node, and the fleet reads it there."""

import os
import threading
import time
from dataclasses import dataclass

import ray

BOARD_SECONDS = 20.0
REPORT_SECONDS = 2.0


class ToldToLeave(Exception):
    """The fleet ends."""


@dataclass(frozen=True)
class Reported:
    """What an attempt said last."""

    node: str
    log: str
    """The worker's log on that node."""
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

    def __init__(self, board: ray.actor.ActorHandle, key: str, number: int, leaving: threading.Event):
        self.board, self.key, self.number, self.leaving = board, key, number, leaving
        self.node = ray.get_runtime_context().get_node_id()
        self.log = worker_log()
        self.written = time.monotonic()
        # known, whatever happens next
        ray.wait([board.write.remote(key, number, Reported(self.node, self.log))], timeout=BOARD_SECONDS)

    def __call__(self, done: int) -> None:
        """Raises: ToldToLeave: the fleet ends."""
        if self.leaving.is_set():
            raise ToldToLeave(f"{self.key}: the job ends")
        if time.monotonic() - self.written >= REPORT_SECONDS:
            self.written = time.monotonic()
            self.board.write.remote(self.key, self.number, Reported(self.node, self.log, done))


def worker_log() -> str:
    """What this worker process writes to stderr, on its node."""
    try:
        return os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
