"""Coordination of a run's processes: joining them, agreeing on when to stop or save, and explaining lost processes."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator

from shards.base.device import collectives_backend
from shards.base.errors import RequestError, WorkError
from shards.base.pool import die_with
from shards.base.stop import SignalFlag
from train.run.health.heartbeat import STARTING, HeartbeatReporter
from train.run.lease.lease import Lease
from train.run.preflight import LAUNCHER

CHECK_SECONDS = 1.0
"""Target time in seconds between signal checks. It is half of the 2 s within which a signal should take effect, because
the duration of steps varies."""
MAX_CHECK_INTERVAL = 10
"""Maximum number of steps between signal checks, which bounds the delay if steps suddenly become slower."""


def die_with_launcher() -> None:
    """Ask the kernel to kill this process when its launcher dies, even if the launcher is killed by SIGKILL.

    Without a launcher, or on a system other than Linux, this does nothing.

    Raises:
        WorkError: the launcher is already dead.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    if not die_with(int(launcher)):
        raise WorkError(
            f"The launcher, process {launcher}, is not the parent of this process, so this process exits. Either the "
            f"launcher died during startup, or a script between the launcher and the trainer started the trainer "
            f"without `exec`. Add `exec` to the script if there is one, and run the same command again to resume."
        )


def join_processes(timeout: float, device: str) -> HeartbeatReporter:
    """Initialize the process group before accelerate does, under keys that no earlier attempt has used.

    The launcher's store outlives the processes that it restarts (`--max_restarts`), and still holds the addresses of
    dead processes. Each attempt therefore prefixes its keys with its number. All launchers of a job agree on this
    number, because a lost process ends the attempt on every machine. If no launcher provides a store, rank 0 does.

    Args:
        timeout: seconds after which a collective fails if a process has not joined it.
        device: kind of device on which all processes train, `cuda` or `cpu`.

    Returns:
        The heartbeat reporter of this process, which is already sending unless this is the only process.

    Raises:
        WorkError: a process did not join in time.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return HeartbeatReporter()
    group_timeout = timedelta(seconds=timeout)
    with explain_lost_processes(HeartbeatReporter(timeout=timeout)):
        store, rank, world_size = next(dist.rendezvous("env://", timeout=group_timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"latentmill/attempt-{attempt}", store)
    # a cloned connection, because the process group blocks the original one while it waits for other ranks
    heartbeat = HeartbeatReporter(rank, world_size, store.clone(), timeout).start()
    with explain_lost_processes(heartbeat):
        backend = collectives_backend(device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=group_timeout)
    return heartbeat


class AgreedSignals(NamedTuple):
    """Requests to which all processes respond after the same step."""

    stop: bool = False
    """Save a checkpoint and exit."""
    save: bool = False
    """Save a checkpoint and continue."""


class ShutdownCoordinator:
    """Coordinator that makes all processes respond to a signal after the same step, even if only one received it.

    To agree, the processes need a collective, which makes the host wait for the device. So they check for signals about
    once a second instead of after every step. They also agree on the number of steps until the next check, because each
    process would compute a different number from its own clock.
    """

    def __init__(self, accelerator: Accelerator, lease: Lease, stop: SignalFlag, save: SignalFlag, step: int):
        """Create a coordinator whose first check is after the next step.

        Args:
            lease: this launch's lease. The launch must stop once another launch has taken over the run.
            stop: set by a signal to save and exit.
            save: set by a signal to save and continue.
            step: number of completed steps.
        """
        self.accelerator, self.lease, self.stop, self.save = accelerator, lease, stop, save
        self.last_check, self.next_check, self.timing_since = step, step + 1, time.monotonic()
        self.step_seconds = 0.0
        """Mean duration of the steps between the last two checks."""

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Exclude the time spent in this context, such as the time for saving a checkpoint, from the step times."""
        start = time.monotonic()
        yield
        self.timing_since += time.monotonic() - start

    def check(self, step: int) -> AgreedSignals:
        """Return the requests that any process has received, or no requests if no check is due after `step` steps.

        All processes must call this after every step, and all of them get the same result.

        Raises:
            RequestError: another launch has taken over the run.
        """
        if step < self.next_check:
            return AgreedSignals()
        self.step_seconds = (time.monotonic() - self.timing_since) / (step - self.last_check)
        interval = check_interval(self.step_seconds)
        own = [float(value) for value in (self.stop.received, self.save.received, self.lease.superseded, interval)]
        totals = self.accelerator.reduce(torch.tensor(own, device=self.accelerator.device), "sum").tolist()
        stop, save, superseded, intervals = map(int, totals)  # sums of integers are exact, and so the same everywhere
        if superseded:
            raise self.lease.taken_over()
        self.last_check, self.next_check = step, step + intervals // self.accelerator.num_processes
        self.timing_since = time.monotonic()
        if save:
            self.save.received = False
        return AgreedSignals(bool(stop), bool(save))


def check_interval(seconds_per_step: float) -> int:
    """Return the number of steps, from 1 to MAX_CHECK_INTERVAL, that fit into CHECK_SECONDS."""
    return int(min(max(CHECK_SECONDS / max(seconds_per_step, 1e-9), 1), MAX_CHECK_INTERVAL))


@contextmanager
def explain_lost_processes(heartbeat: HeartbeatReporter) -> Iterator[None]:
    """Turn the failure of a collective into an error that names the missing processes.

    Any other exception is reported to the other processes and re-raised unchanged.

    Raises:
        WorkError: a process died, or did not join a collective before its timeout.
    """
    try:
        yield
    except BaseException as error:
        # gloo raises plain RuntimeErrors whose messages start with the path of its source file
        is_lost = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        if not is_lost or isinstance(error, RequestError | WorkError):
            heartbeat.report_failure(error)
            raise
        moment = (
            "Before the first step" if heartbeat.status.stage == STARTING else f"After step {heartbeat.status.step}"
        )
        missing = heartbeat.describe_missing()
        heartbeat.report_failure(None)
        raise WorkError(
            f"{moment}, a collective failed: another process died, or did not respond within {heartbeat.timeout:g} s "
            f"(set by collective_timeout and, for the first steps, data.first_timeout). {missing}Saved checkpoints "
            f"remain valid. Run the same command again to resume; accelerate's launcher does so automatically with "
            f"`--max_restarts`. If all processes were merely slow, raise collective_timeout. The original error was: "
            f"{str(error).splitlines()[0]}"
        ) from error


def print_once(accelerator: Accelerator, message: str) -> None:
    """Print a message on the run's main process only, whereas `Accelerator.print` prints it on every machine."""
    if accelerator.is_main_process:
        print(message, flush=True)


def set_collective_timeout(heartbeat: HeartbeatReporter, timeout: float, groups: Sequence[dist.ProcessGroup]) -> None:
    """Set the seconds after which a collective fails if a process has not joined it.

    Args:
        groups: the process groups other than the default group.
    """
    heartbeat.timeout = timeout
    if heartbeat.store is not None:
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # before torch 2.15
        for group in (None, *groups):
            set_timeout(timedelta(seconds=timeout), group)
