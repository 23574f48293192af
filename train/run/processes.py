"""The processes of a run: how they find each other, at each start and restart, how one is missed, and how they die."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator

from shards.base.device import collectives_backend
from shards.base.errors import RequestError, WorkError
from shards.base.stop import SignalFlag
from train.run.health.heartbeat import STARTING, HeartbeatReporter
from train.run.launches import Launch
from train.run.preflight import LAUNCHER

PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 1.0
"""Between looks at whether to leave: half of the 2 s within which it is agreed, as steps are not all alike."""
MOST_STEPS = 10
"""Between looks: a bound on the wait where steps suddenly take longer."""


def die_with_launcher() -> None:
    """Have the kernel kill this process when its launcher dies, which may die of SIGKILL; Linux alone can.

    Raises:
        WorkError: it is dead already.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(launcher):  # it died before the kernel was told, which sends nothing afterwards
        raise WorkError(
            f"The launcher, process {launcher}, is not the parent of this process: it died, and this one leaves with "
            f"it. The same command again resumes. (A script between the two must `exec` the trainer.)"
        )


def join_processes(timeout: float, device: str) -> HeartbeatReporter:
    """Start the process group, before accelerate would, so that a restarted job meets nothing of the one before it.

    The launcher's store outlives the processes that it starts again (`--max_restarts`), and with them the addresses of
    the dead: each attempt therefore keeps its keys under a name of its own. Where no launcher holds a store, rank 0
    does. All launchers of a job count alike, since a process that is lost ends the attempt on every machine.

    Args:
        timeout: seconds after which a collective that some process does not join is an error.
        device: `cuda` or `cpu`, on which all processes train.

    Returns:
        What tells the others what this process is at.

    Raises:
        WorkError: some process does not come.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return HeartbeatReporter()
    patience = timedelta(seconds=timeout)
    with lost_processes_named(HeartbeatReporter(limit=timeout)):
        store, rank, world_size = next(dist.rendezvous("env://", timeout=patience))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = dist.PrefixStore(f"latentmill/attempt-{attempt}", store)
    # a connection of its own: the group's waits for others
    heartbeat = HeartbeatReporter(rank, world_size, shared.clone(), timeout).start()
    with lost_processes_named(heartbeat):
        backend = collectives_backend(device)
        dist.init_process_group(backend, store=shared, rank=rank, world_size=world_size, timeout=patience)
    return heartbeat


class Told(NamedTuple):
    """What a run was told by signals."""

    leave: bool = False
    save: bool = False


class ShutdownCoordinator:
    """Whether the run is to leave, or to save and go on, as all its processes agree.

    A look makes the host wait for the device. So there is one in as many steps as take a second. All processes look
    after the same step, so they agree on the next one too.
    """

    def __init__(self, accelerator: Accelerator, launch: Launch, stop: SignalFlag, save: SignalFlag, step: int):
        """`stop` and `save`: what to listen to; `step`: after which the run stands."""
        self.accelerator, self.launch, self.stop, self.save = accelerator, launch, stop, save
        self.looked, self.next, self.since = step, step + 1, time.monotonic()
        self.step_seconds = 0.0
        """What a step took before the last look."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around what is no part of a step."""
        began = time.monotonic()
        yield
        self.since += time.monotonic() - began

    def agreed(self, step: int) -> Told:
        """What any process was told, after `step` steps; all get the same answer.

        Raises:
            RequestError: another launch has taken the run over.
        """
        if step < self.next:
            return Told()
        self.step_seconds = (time.monotonic() - self.since) / (step - self.looked)
        interval = look_interval(self.step_seconds)
        heard = (self.stop.received, self.save.received, self.launch.superseded)
        said = [*map(float, heard), float(interval)]
        total = self.accelerator.reduce(torch.tensor(said, device=self.accelerator.device), "sum").tolist()
        if total[2]:
            raise self.launch.taken_over()
        # sums of whole numbers are exact: the same on every process
        self.looked, self.next = step, step + int(total[3]) // self.accelerator.num_processes
        self.since = time.monotonic()
        if total[1]:
            self.save.received = False
        return Told(bool(total[0]), bool(total[1]))


def look_interval(seconds_per_step: float) -> int:
    """Steps from one look to the next, so that they take LOOK_SECONDS at most, or one step."""
    return int(min(max(LOOK_SECONDS / max(seconds_per_step, 1e-9), 1), MOST_STEPS))


@contextmanager
def lost_processes_named(heartbeat: HeartbeatReporter) -> Iterator[None]:
    """Turn the failure of a collective into an error for people; tell the others of any other that ends this process.

    Raises:
        WorkError: a process died, or did not answer for as long as a collective may take.
    """
    try:
        yield
    except BaseException as error:
        # gloo raises plain RuntimeErrors, which begin with its source file's path
        is_lost = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        if not is_lost or isinstance(error, RequestError | WorkError):
            heartbeat.fail(error)
            raise
        moment = "Before the first step" if heartbeat.beat.at == STARTING else f"After step {heartbeat.beat.step}"
        who = heartbeat.explained()
        heartbeat.fail(None)
        raise WorkError(
            f"{moment}, a collective failed: another process died, or did not answer for {heartbeat.limit:g} s "
            f"(collective_timeout; in the first steps, data.first_timeout). {who}What is saved stays valid: the "
            f"same command again resumes, and `--max_restarts` of accelerate's launcher does so by itself. If every "
            f"process was only slow, raise collective_timeout. ({str(error).splitlines()[0]})"
        ) from error


def expect_answers(heartbeat: HeartbeatReporter, timeout: float) -> None:
    """From here on a collective that some process does not join is an error after `timeout` seconds."""
    heartbeat.limit = timeout
    if heartbeat.store is not None:
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # before torch 2.15
        set_timeout(timedelta(seconds=timeout))
