"""Loader workers: processes that load batches in advance."""

import multiprocessing
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Protocol

import torch
import torch.multiprocessing  # registers the reducers that send shared-memory tensors without a copy

from shards.base.errors import WorkError
from train.data.batch import Batch

GRACE_SECONDS = 120
"""Seconds that a loader worker keeps running after SIGTERM."""
JOIN_SECONDS = 5.0
"""Maximum time to wait for the exit code of a worker that has closed its connection."""
CAUSES = {
    signal.SIGKILL: "The machine may have run out of memory: lower data.num_workers or data.prefetch_gb.",
    signal.SIGBUS: "/dev/shm is probably full: enlarge it (docker run --shm-size), or lower data.prefetch_gb.",
}
"""Signal that killed a worker → its probable cause, with a remedy."""
OTHER_CAUSES = "If it printed an error above, fix the cause, then run the same command again to resume."
"""Advice for a worker that died for any other reason."""


class LoadFailure(str):
    """Error message that stands for a batch that could not be loaded."""


class WorkerDeath(WorkError):
    """A loader worker died or exited."""


class Batches(Protocol):
    """Source of this rank's share of each global batch."""

    def load(self, step: int) -> Batch | LoadFailure: ...

    def reconnect(self) -> None:
        """Replace all connections to stores, because they do not survive a fork."""


class LoaderWorkers:
    """Forked processes that load the steps `first`, `first` + 1, … in turn, each up to `ahead` batches in advance.

    They are forked so that they share the order and the index with this process instead of loading them again.
    """

    def __init__(self, batches: Batches, num_workers: int, ahead: int, first: int):
        self.first, self.ahead = first, num_workers * ahead
        context = multiprocessing.get_context("fork")
        self.processes: list[ForkProcess] = []
        self.connections: list[Connection] = []
        for number in range(num_workers):
            here, there = context.Pipe()
            # the worker closes its copies of these ends; otherwise no worker would notice that this process has ended
            inherited = [*self.connections, here]
            process = context.Process(
                target=run_worker, args=(batches, there, inherited), daemon=True, name=f"loader worker {number}"
            )
            process.start()
            there.close()
            self.processes.append(process)
            self.connections.append(here)
        for step in range(first, first + self.ahead):
            self._request(step)

    def get(self, step: int, timeout: float) -> Batch | LoadFailure:
        """Return the batch of `step`. Steps must be requested in order.

        Raises:
            WorkerDeath: any of the workers died. Others may be waiting forever for a lock that it held.
            WorkError: no batch arrived within `timeout` seconds.
        """
        number = (step - self.first) % len(self.processes)
        connection = self.connections[number]
        ready = wait([connection, *(process.sentinel for process in self.processes)], timeout)
        if not ready:
            raise WorkError(f"No batch arrived within {timeout:g} s.")
        if connection not in ready:
            dead = next(process for process in self.processes if process.sentinel in ready)
            raise WorkerDeath(self._explain_death(dead))
        try:
            batch: Batch | LoadFailure = connection.recv()
            self._request(step + self.ahead)
        except (EOFError, OSError):
            raise WorkerDeath(self._explain_death(self.processes[number])) from None
        return batch

    def kill(self) -> None:
        """Kill the workers, including those that are stuck. Nobody will read what they are loading."""
        for process in self.processes:
            process.kill()

    def _request(self, step: int) -> None:
        self.connections[(step - self.first) % len(self.processes)].send(step)

    @staticmethod
    def _explain_death(process: ForkProcess) -> str:
        process.join(JOIN_SECONDS)
        if process.exitcode is None:
            return f"A loader worker closed its connection unexpectedly. {OTHER_CAUSES}"
        if process.exitcode >= 0:
            return f"A loader worker exited unexpectedly with code {process.exitcode}. {OTHER_CAUSES}"
        killer = signal.Signals(-process.exitcode)
        return f"A loader worker was killed by {killer.name}. {CAUSES.get(killer, OTHER_CAUSES)}"


def run_worker(batches: Batches, connection: Connection, inherited: Sequence[Connection]) -> None:
    """Load the steps that arrive on `connection`, until the trainer closes its end or ends.

    A scheduler signals every process of a job, but the trainer needs its loader until it has saved a checkpoint.
    SIGTERM therefore terminates a worker only after GRACE_SECONDS. It cannot be ignored altogether, because an exiting
    trainer uses it to end its workers.
    """
    for other in inherited:
        other.close()
    # a progress bar may have replaced these streams, and the copy of its lock in this fork might never be released
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the whole process group
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE_SECONDS))
    torch.set_num_threads(1)
    batches.reconnect()
    try:
        while True:
            connection.send(batches.load(connection.recv()))
    except (EOFError, ConnectionError):
        pass
