"""Heartbeats: each rank publishes its progress to all others, so that a failed collective can name the missing ranks.

In each rank, a thread writes the rank's status to the process group's store, so the machines need not share a folder.
The training loop only records which stage it enters, and never waits for a heartbeat.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch.distributed as dist

from shards.base.table import counted
from train.data.deadline import within

HEARTBEAT_SECONDS = 2.0
"""Interval between heartbeats, in seconds."""
SILENCE_SECONDS = 2.5 * HEARTBEAT_SECONDS
"""Time in seconds without a heartbeat after which a rank counts as silent."""
STORE_SECONDS = 10.0
"""Time in seconds to wait for the process group's store, whose host may be lost."""
MAX_NAMED = 4
"""Maximum number of ranks that a message names."""
STARTING, LOADING, LEAVING, FAILED = "starting", "loading", "shutting down", "failed: "
"""Stages of a rank. In stage LEAVING, the rank ends because other ranks are missing. FAILED is a prefix, followed by
the rank's error."""


class RankStatus(NamedTuple):
    """Progress of a rank, as of its last heartbeat. Times are in seconds since 1970, by the clock of its host."""

    rank: int
    host: str
    pid: int
    step: int
    """Number of completed steps."""
    stage: str
    """Current stage, such as `loading` or `training`, or FAILED followed by an error."""
    num_stages: int
    """Number of stages that the rank has entered. All ranks enter the same stages in the same order."""
    stage_began: float
    """Time at which the rank entered its current stage."""
    sent: float
    """Time of the heartbeat."""
    loading_seconds: float = 0.0
    """Total time that the rank spent waiting for batches before the current stage."""

    @property
    def label(self) -> str:
        """Rank, host and process, for messages."""
        return f"rank {self.rank} (host {self.host}, process {self.pid})"

    @property
    def position(self) -> str:
        """Stage and step, for messages."""
        return f"{self.stage} after step {self.step}"


class MissingRanks(NamedTuple):
    """The ranks that the other ranks are waiting for."""

    ranks: Collection[int]
    """Numbers of the missing ranks; empty if all ranks are in the same stage, in which case a device or the network is
    the cause."""
    message: str
    """Clause that names the ranks, their hosts and their stages."""


def find_missing_ranks(statuses: Sequence[RankStatus | None], silent: Collection[int], now: float) -> MissingRanks:
    """Find the ranks that never joined, failed or fell silent. If there are none, find the ranks furthest behind.

    Args:
        statuses: last status of each rank; None: the rank has never sent a heartbeat.
        silent: ranks that no longer send heartbeats.
        now: current time in seconds since 1970.
    """
    known = [status for status in statuses if status is not None]
    problems = {rank: f"rank {rank} never joined" for rank, status in enumerate(statuses) if status is None}
    for status in known:
        if status.stage.startswith(FAILED):
            error = status.stage.removeprefix(FAILED)
            problems[status.rank] = f"{status.label} failed after step {status.step}: {error}"
        elif status.rank in silent and status.stage != LEAVING:
            seconds = max(0.0, now - status.sent)
            problems[status.rank] = (
                f"{status.label} has sent no heartbeat for {seconds:.0f} s; its last known state was {status.position}"
            )

    if not problems:
        fewest = min(status.num_stages for status in known)
        behind = [status for status in known if status.num_stages == fewest]
        if len(behind) == len(known):
            longest = now - min(status.stage_began for status in known)
            return MissingRanks(
                (),
                f"all {len(known)} ranks are alive and have been {known[0].position} for up to {longest:.0f} s, so a "
                f"device or the network is stuck",
            )
        for status in behind:
            seconds = max(0.0, now - status.stage_began)
            problems[status.rank] = f"{status.label} has been {status.position} for {seconds:.0f} s"

    message = "; ".join(list(problems.values())[:MAX_NAMED])
    if len(problems) > MAX_NAMED:
        message += f"; and {counted(len(problems) - MAX_NAMED, 'more rank')}"
    others = [status for status in known if status.rank not in problems]
    if others:
        rest = "the other rank is" if len(others) == 1 else "the others are"
        message += f"; {rest} {max(others, key=lambda status: status.num_stages).position}"
    return MissingRanks(set(problems), message)


class HeartbeatReporter:
    """Reporter of this rank's status, which it publishes every HEARTBEAT_SECONDS between `start` and `close`.

    It also reads the statuses of all ranks.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, store: dist.Store | None = None, timeout: float = 600.0):
        """
        Args:
            store: the process group's store; None: this is the only process.
            timeout: seconds after which a collective fails.
        """
        self.store, self.world_size, self.timeout = store, world_size, timeout
        now = time.time()
        self.status = RankStatus(rank, socket.gethostname(), os.getpid(), 0, STARTING, 0, now, now)
        self.warned_stage = -1
        """Number (`num_stages`) of the last stage for which this rank looked for missing ranks."""
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._send_until_closed, daemon=True, name="heartbeat")

    def start(self) -> "HeartbeatReporter":
        """Start sending heartbeats if there are other ranks, and return this reporter."""
        if self.store is not None:
            self.thread.start()
        return self

    def close(self) -> None:
        """Stop sending heartbeats."""
        self.closing.set()
        if self.thread.is_alive():
            self.thread.join(HEARTBEAT_SECONDS)  # a process must not exit while one of its threads is inside torch

    def enter(self, step: int, stage: str) -> None:
        """Record that this rank enters a stage after `step` completed steps.

        All ranks must enter the same stages in the same order.
        """
        last, now = self.status, time.time()
        loading_seconds = last.loading_seconds + (now - last.stage_began if last.stage == LOADING else 0.0)
        self.status = last._replace(
            step=step, stage=stage, num_stages=last.num_stages + 1, stage_began=now, loading_seconds=loading_seconds
        )

    def report_failure(self, error: BaseException | None) -> None:
        """Publish the reason why this rank ends.

        Args:
            error: the error that ends it; None: it ends because other ranks are missing.
        """
        if error is None:
            stage = LEAVING
        else:
            first_line = (str(error).splitlines() or [""])[0]
            stage = f"{FAILED}{type(error).__name__}: {first_line[:200]}"
        self.status = self.status._replace(stage=stage)
        if self.store is not None:
            within(STORE_SECONDS, self._send)

    def read_statuses(self) -> list[RankStatus | None]:
        """Read the last status of every rank; None for a rank that has never sent a heartbeat.

        Raises:
            RuntimeError: torch can no longer reach the store.
        """
        if self.store is None:
            return [self.status._replace(sent=time.time())]
        keys = [f"beat/{rank}" for rank in range(self.world_size)]
        present = keys if self.store.check(keys) else [key for key in keys if self.store.check([key])]
        found = dict(zip(present, self.store.multi_get(present), strict=True))
        return [RankStatus(**json.loads(found[key])) if key in found else None for key in keys]

    def find_missing(self) -> MissingRanks | None:
        """Find the ranks that the others are waiting for, or return None if the store does not respond.

        This takes SILENCE_SECONDS, in which it observes which ranks still send heartbeats.
        """
        return within(STORE_SECONDS, self._find_missing)

    def describe_missing(self) -> str:
        """Return a sentence that names the missing ranks, for an error message.

        The sentence is empty if this is the only process.
        """
        if self.store is None:
            return ""
        missing = self.find_missing()
        if missing is None:
            where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            return (
                f"The store at {where}, which holds the heartbeats, does not respond either, so check the machine "
                f"that runs rank 0. "
            )
        return f"{missing.message[0].upper()}{missing.message[1:]}. "

    def _find_missing(self) -> MissingRanks | None:
        try:
            before = self.read_statuses()
            time.sleep(SILENCE_SECONDS)
            statuses = self.read_statuses()
        except RuntimeError:  # the store is gone
            return None
        pairs = zip(statuses, before, strict=True)
        unchanged = {status.rank for status, earlier in pairs if status and status == earlier}
        return find_missing_ranks(statuses, unchanged - {self.status.rank}, time.time())

    def _send(self) -> bool:
        """Send a heartbeat, and return whether the store accepted it."""
        assert self.store is not None
        status = self.status._replace(sent=time.time())
        try:
            self.store.set(f"beat/{status.rank}", json.dumps(status._asdict()))
        except RuntimeError:  # the store is gone, so the next collective fails and reports it
            return False
        return True

    def _send_until_closed(self) -> None:
        while not self.closing.is_set() and self._send():
            status = self.status
            if time.time() - status.stage_began > self.timeout / 2 and self.warned_stage != status.num_stages:
                self.warned_stage = status.num_stages
                # in a separate thread, because finding the missing ranks takes longer than the heartbeat interval
                threading.Thread(target=self._warn, daemon=True).start()
            self.closing.wait(HEARTBEAT_SECONDS)

    def _warn(self) -> None:
        """Print which ranks are missing, because NCCL ends the process at the timeout without naming them.

        Only the lowest rank that is not missing prints the warning.
        """
        missing = self.find_missing()
        if missing and min(set(range(self.world_size)) - set(missing.ranks), default=-1) == self.status.rank:
            print(f"warning: {missing.message}. The run ends once this has lasted for {self.timeout:g} s.", flush=True)
