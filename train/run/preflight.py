"""Checks of a launch that need no data: number of processes, nodes, tracker, run folder."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shards.base.errors import RequestError

if TYPE_CHECKING:
    from accelerate import Accelerator

LAUNCHER = "LATENTMILL_LAUNCHER"
"""Environment variable that passes the process id of `python -m train.launch` to the processes that it starts."""
SHUTDOWN_TIMEOUT = "PET_SHUTDOWN_TIMEOUT"
"""Environment variable: seconds that the processes have to save and exit after a stop signal. torch reads it, too."""
DEFAULT_SHUTDOWN_SECONDS = "120"
PLAIN_LAUNCHES = ("NO", "MULTI_GPU", "MULTI_CPU")
"""Values of accelerate's `DistributedType` that this trainer supports."""


@dataclass(frozen=True)
class World:
    """The number of processes of a run."""

    size: int
    local_size: int
    """Number of processes on each node."""

    @classmethod
    def launched(cls) -> "World":
        """Read the launcher's environment variables.

        Raises:
            RequestError: srun started several tasks without a launcher, so they do not know of each other.
        """
        tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
        if tasks > 1 and "WORLD_SIZE" not in os.environ:
            raise RequestError(
                f"srun started {tasks} tasks, but WORLD_SIZE is not set, so each would train by itself in the same run "
                f"folder. Start them with the launcher (`srun python -m train.launch --slurm -m train --config …`), or "
                f"ask srun for one task (-n 1)."
            )
        size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(size, int(os.environ.get("LOCAL_WORLD_SIZE", str(size))))

    def check(self, asked_for: int | None, global_batch_size: int) -> None:
        """Check the number of processes against the config.

        Raises:
            RequestError: a different number was requested, or the batch cannot be shared evenly.
        """
        if asked_for not in (None, self.size):
            raise RequestError(
                f"num_processes is {asked_for}, but {self.size} were started. Pass `--num_processes {asked_for}` to "
                f"the launcher; on a machine without GPUs, accelerate also needs `--multi_gpu` (it then uses gloo)."
            )
        if global_batch_size % self.size:
            raise RequestError(
                f"global_batch_size {global_batch_size} cannot be shared evenly by {self.size} processes. Start a "
                f"number of processes that divides it, because a run must keep its batch size. A new run can use a "
                f"multiple of {self.size}."
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
            f"log.tracker {name} is unknown. Set it to none, or to one of {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}."
        )
    if name not in {tracker.value for tracker in get_available_trackers()}:
        raise RequestError(
            f"log.tracker {name} needs a package that is not installed. Install it (`pip install "
            f"{name.replace('_', '-')}`), or set log.tracker to tensorboard or none."
        )


def check_launch(accelerator: "Accelerator | None", world: World) -> None:
    """Check that this trainer supports what the launcher set up.

    Raises:
        RequestError: the launcher set up an unsupported backend or gradient scaling, or the nodes have different
            numbers of processes, so that some samples would be used twice and others never.
    """
    shares, scaled = {world.local_size}, False
    if accelerator is not None:
        from accelerate.utils import gather_object

        if accelerator.distributed_type.value not in PLAIN_LAUNCHES:
            raise RequestError(
                f"The launcher set up {accelerator.distributed_type.value}, which this trainer does not support. "
                f"Launch with one of the files in configs/accelerate/."
            )
        # gathered, because nodes may have different environments and all processes must refuse together
        everywhere = gather_object([(world.local_size, accelerator.gradient_accumulation_steps)])
        shares, scaled = {share for share, _ in everywhere}, any(steps != 1 for _, steps in everywhere)
    if len(shares) > 1 or world.size % world.local_size:
        raise RequestError(
            f"{world.size} processes are not spread evenly over the nodes: LOCAL_WORLD_SIZE is "
            f"{' and '.join(map(str, sorted(shares)))}. Start the same number of processes on each node."
        )
    if scaled:
        raise RequestError(
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is set, so accelerate would scale the gradients. Unset it; "
            "microbatch_size controls gradient accumulation here."
        )


def check_run_dir(run_dir: Path) -> None:
    """Check that the run folder can be written or created.

    Raises:
        RequestError: it cannot.
    """
    above = (run_dir, *run_dir.absolute().parents)
    nearest = next(folder for folder in above if os.path.exists(folder))  # Path.exists may raise
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        why = "is not writable" if nearest.is_dir() else "is a file"
        raise RequestError(f"run_dir {run_dir} cannot be used: {nearest} {why}. Choose a different run_dir.")
