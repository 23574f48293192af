"""Checks before a launch that need no data: the number of processes per node, the tracker and the run folder."""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shards.base.errors import RequestError

if TYPE_CHECKING:
    from accelerate import Accelerator

LAUNCHER = "LATENTMILL_LAUNCHER"
"""Environment variable that passes the process ID of `python -m train.launch` to the processes that it starts."""
SHUTDOWN_TIMEOUT = "PET_SHUTDOWN_TIMEOUT"
"""Environment variable with the seconds in which processes must save and exit after a stop signal. torch also reads
it."""
DEFAULT_SHUTDOWN_SECONDS = "120"
SUPPORTED_LAUNCHES = ("NO", "MULTI_GPU", "MULTI_CPU")
"""Values of accelerate's `DistributedType` that this trainer supports."""

VISIBLE_SECONDS = 60.0
"""Seconds after which a new folder must be visible on all machines. NFS clients may cache a folder's content this
long."""


@dataclass(frozen=True)
class World:
    """The number of processes in a run, in total and per node."""

    size: int
    local_size: int
    """Number of processes on each node."""

    @classmethod
    def launched(cls) -> "World":
        """Read the launcher's environment variables.

        Raises:
            RequestError: srun started several tasks without a launcher, so the tasks do not know about each other.
        """
        tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
        if tasks > 1 and "WORLD_SIZE" not in os.environ:
            raise RequestError(
                f"srun started {tasks} tasks, but WORLD_SIZE is not set, so each task would train separately in the "
                f"same run folder. Start the tasks with the launcher (`srun python -m train.launch --slurm -m train "
                f"--config …`), or request a single task from srun (-n 1)."
            )
        size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(size, int(os.environ.get("LOCAL_WORLD_SIZE", str(size))))

    @classmethod
    def planned(cls, num_processes: int | None) -> "World":
        """Return the launched processes. If only this process was launched, return `num_processes` on one node."""
        launched = cls.launched()
        return launched if launched.size > 1 or num_processes is None else cls(num_processes, num_processes)

    def check(self, num_processes: int | None, global_batch_size: int, sharding_group: int | None = None) -> None:
        """Check the number of processes against the config.

        Args:
            num_processes: number of processes that the config requests; None: any number.
            sharding_group: number of processes that share a copy of the weights; None: all.

        Raises:
            RequestError: a different number of processes was started, or they cannot share the global batch evenly or
                form groups of that size.
        """
        if num_processes not in (None, self.size):
            started = "1 process was" if self.size == 1 else f"{self.size} processes were"
            raise RequestError(
                f"num_processes is {num_processes}, but {started} started. Pass `--num_processes "
                f"{num_processes}` to the launcher. On a machine without GPUs, also pass `--multi_gpu`; accelerate "
                f"then uses gloo."
            )
        if global_batch_size % self.size:
            raise RequestError(
                f"global_batch_size {global_batch_size} is not divisible by the number of processes ({self.size}). A "
                f"run must keep its batch size, so change the number of processes to a divisor of it. For a new run, "
                f"you can also set global_batch_size to a multiple of {self.size}."
            )
        if sharding_group is not None and self.size % min(sharding_group, self.size):
            raise RequestError(
                f"sharding_group {sharding_group} does not divide the number of processes ({self.size}). Set it to a "
                f"divisor, such as the number of GPUs on a node, or to null."
            )


def check_tracker(name: str) -> None:
    """Check that accelerate supports the tracker and that its package is installed.

    Raises:
        RequestError: the tracker is unknown, or its package is not installed.
    """
    if name == "none":
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    if name not in LOGGER_TYPE_TO_CLASS:
        raise RequestError(
            f"log.tracker is {name}, which is unknown. Set log.tracker to none, or to one of "
            f"{', '.join(sorted(LOGGER_TYPE_TO_CLASS))}."
        )
    if name not in {tracker.value for tracker in get_available_trackers()}:
        raise RequestError(
            f"log.tracker is {name}, but the package for this tracker is not installed. Install the package (`pip "
            f"install {name.replace('_', '-')}`), or set log.tracker to tensorboard or none."
        )


def check_launch(accelerator: "Accelerator | None", world: World, problem: str | None = None) -> None:
    """Check that this trainer supports the launcher's configuration.

    Args:
        accelerator: the accelerator that the launcher configured; None: this is the only process.
        problem: error message about this process's device or node; None: it can run the config.

    Raises:
        RequestError: a process has a problem, the launcher set up an unsupported backend or gradient scaling, or the
            nodes have different numbers of processes, so that some samples would be used twice and others would never
            be used.
    """
    local_sizes, scales_gradients, problems = {world.local_size}, False, [problem]
    if accelerator is not None:
        from accelerate.utils import gather_object

        if accelerator.distributed_type.value not in SUPPORTED_LAUNCHES:
            raise RequestError(
                f"The launcher set up the distributed type {accelerator.distributed_type.value}, which this trainer "
                f"does not support. Launch with configs/accelerate/ddp.yaml."
            )
        # gathered, because nodes may have different environments, and all processes must raise the same error
        gathered = gather_object([(world.local_size, accelerator.gradient_accumulation_steps, problem)])
        local_sizes = {local_size for local_size, _, _ in gathered}
        scales_gradients = any(steps != 1 for _, steps, _ in gathered)
        problems = [each for _, _, each in gathered]
    for each in problems:
        if each is not None:
            raise RequestError(each)
    if len(local_sizes) > 1 or world.size % world.local_size:
        raise RequestError(
            f"The processes are not spread evenly over the nodes: WORLD_SIZE is {world.size}, and LOCAL_WORLD_SIZE is "
            f"{' and '.join(map(str, sorted(local_sizes)))}. Start the same number of processes on each node."
        )
    if scales_gradients:
        raise RequestError(
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is set, so accelerate would scale the gradients. Unset "
            "this variable. In this trainer, microbatch_size controls gradient accumulation."
        )


def check_shared(accelerator: "Accelerator", setting: str, folder: Path) -> None:
    """Check that every machine sees a folder that exists on the main process's machine.

    Args:
        setting: the config field that contains the folder.

    Raises:
        RequestError: a machine does not see it.
    """
    from accelerate.utils import gather_object

    lacking = None
    if accelerator.is_local_main_process:
        end = time.monotonic() + VISIBLE_SECONDS
        while not folder.is_dir() and time.monotonic() < end:
            time.sleep(0.1)
        lacking = None if folder.is_dir() else socket.gethostname()
    hosts = sorted({host for host in gather_object([lacking]) if host is not None})
    if hosts:
        raise RequestError(
            f"{folder} in {setting} exists on the run's first machine, but not on {', '.join(hosts)}. All machines "
            f"must see the same {setting}: put it on a file system that they share, or at an object-store URL."
        )


def check_run_dir(run_dir: Path) -> None:
    """Check that the run folder is writable, or can be created.

    Raises:
        RequestError: `run_dir`, or its nearest existing parent if it does not exist, is not writable or is a file.
    """
    candidates = (run_dir, *run_dir.absolute().parents)
    # Path.exists would raise PermissionError inside a folder that this process may not enter
    existing = next(folder for folder in candidates if os.path.exists(folder))
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        problem = "is not writable" if existing.is_dir() else "is a file"
        raise RequestError(f"run_dir {run_dir} cannot be used: {existing} {problem}. Choose a different run_dir.")
