"""The Ray actor behind each worker, and the board on which attempts report their progress to the pool."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

import ray

from cluster.start import forget_ranks
from shards.base.device import choose_device, is_device_error
from shards.base.errors import Stuck

Work = TypeVar("Work")
Result = TypeVar("Result")
Report = Callable[[int], None]
"""Function that the work calls to report its progress, as the amount done so far."""
Attempt = tuple[str, int]
"""Unit key and attempt number."""
Function = Callable[[Work, int, Report], Result]
"""Function that workers run: (work, attempt number counted from 1, report) → result. It is pickled once per job."""
REPORT_SECONDS = 2.0
"""Minimum interval between an attempt's reports."""


class JobStopping(Exception):
    """Exception that ends an attempt because the job is stopping."""


class ProgressBoard:
    """Actor on the driver's node that holds the progress of the running attempts."""

    def __init__(self) -> None:
        self.done: dict[Attempt, int] = {}

    def write(self, attempt: Attempt, done: int) -> None:
        """Store an attempt's progress, replacing its previous report."""
        self.done[attempt] = done

    def read(self, running: set[Attempt]) -> dict[Attempt, int]:
        """Return the progress of the attempts in `running` that have reported any, and forget all other attempts."""
        self.done = {attempt: done for attempt, done in self.done.items() if attempt in running}
        return self.done


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

    def place(self) -> tuple[str, str]:
        """Return the id of this worker's node, and the path of its log there."""
        return str(ray.get_runtime_context().get_node_id()), worker_log()

    def attempt(self, function: Function[Work, Result], key: str, work: Work, number: int) -> Result:
        """Run an attempt and return its result. Each log line starts with the unit's key and the attempt's number,
        because all attempts on a worker share its log.

        The process ends after a device error, because it cannot use its GPU again, and after `Stuck`. The fleet then
        counts the attempt as lost and starts a new worker.
        """
        written = time.monotonic()

        def report(done: int) -> None:
            nonlocal written
            if self.stopping.is_set():
                raise JobStopping(f"{key}: the job is stopping.")
            if time.monotonic() - written >= REPORT_SECONDS:
                written = time.monotonic()
                self.board.write.remote((key, number), done)

        def log(text: str) -> None:
            lines = (f"{key}: attempt {number} {line}\n" for line in text.splitlines())
            print("".join(lines), end="", file=sys.stderr, flush=True)

        log("begins")
        try:
            if ray.get_gpu_ids():
                choose_device()  # raises an error if torch cannot use this node's GPU
            result = function(work, number, report)
        except BaseException as error:
            log(f"failed: {type(error).__name__}: {error}\n{traceback.format_exc()}")
            if isinstance(error, Stuck) or (isinstance(error, RuntimeError) and is_device_error(error)):
                os._exit(1)
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
