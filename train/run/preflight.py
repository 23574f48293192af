"""Whether the launch can do what is asked, before anything is opened: processes, nodes, tracker, run folder."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shards.base.errors import RequestError

if TYPE_CHECKING:
    from accelerate import Accelerator

LAUNCHER = "LATENTMILL_LAUNCHER"
"""Environment variable: the process id of `python -m train.launch`, for the processes that it starts."""
PLAIN_LAUNCHES = ("NO", "MULTI_GPU", "MULTI_CPU")
"""Of accelerate's `DistributedType`."""


@dataclass(frozen=True)
class World:
    """The processes of a run."""

    size: int
    local_size: int
    """On each node."""

    @classmethod
    def launched(cls) -> "World":
        """As the launcher's environment has it.

        Raises:
            RequestError: Slurm started several processes, and nobody told them of each other.
        """
        tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
        if tasks > 1 and "WORLD_SIZE" not in os.environ:
            raise RequestError(
                f"srun started {tasks} tasks, but WORLD_SIZE is not set: each would train alone, in one run folder. "
                f"Put the launcher before the trainer (`srun python -m train.launch --slurm -m train --config …`), or "
                f"ask srun for one task (-n 1)."
            )
        size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(size, int(os.environ.get("LOCAL_WORLD_SIZE", str(size))))

    def check(self, asked_for: int | None, global_batch_size: int) -> None:
        """Hold it against the batch that the processes share.

        Raises:
            RequestError: another number was asked for, or the batch cannot be shared evenly.
        """
        if asked_for not in (None, self.size):
            raise RequestError(
                f"{asked_for} processes were asked for, but {self.size} were started. On a machine without GPUs, "
                f"accelerate needs `--multi_gpu --num_processes {asked_for}` (it then uses gloo)."
            )
        if global_batch_size % self.size:
            raise RequestError(
                f"global_batch_size {global_batch_size} cannot be shared evenly by {self.size} processes. Start a "
                f"number that divides it: a run keeps its batch. A new run may take a multiple of {self.size}."
            )


def check_tracker(name: str) -> None:
    """Hold the tracker against those that accelerate drives, and that can be imported here.

    Raises:
        RequestError: it is none of them, or its package is not installed.
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
            f"log.tracker {name} needs a package that is not installed here. Install it (`pip install "
            f"{name.replace('_', '-')}`), or set log.tracker to tensorboard or none."
        )


def check_launch(accelerator: "Accelerator | None", world: World) -> None:
    """Hold what the launcher set up against what this trainer drives.

    Raises:
        RequestError: it is something else; or nodes have unequal shares, and samples would come twice or never.
    """
    shares, scaled = {world.local_size}, False
    if accelerator is not None:
        from accelerate.utils import gather_object

        if accelerator.distributed_type.value not in PLAIN_LAUNCHES:
            raise RequestError(
                f"The launcher set up {accelerator.distributed_type.value}, which this trainer does not drive. Launch "
                f"with one of configs/accelerate/."
            )
        # of all, so that all refuse together: each node has an environment of its own
        everywhere = gather_object([(world.local_size, accelerator.gradient_accumulation_steps)])
        shares, scaled = {share for share, _ in everywhere}, any(steps != 1 for _, steps in everywhere)
    if len(shares) > 1 or world.size % world.local_size:
        raise RequestError(
            f"{world.size} processes are not spread evenly over the nodes: LOCAL_WORLD_SIZE is "
            f"{' and '.join(map(str, sorted(shares)))}. Start as many processes on each node as on the others."
        )
    if scaled:
        raise RequestError(
            "The environment has ACCELERATE_GRADIENT_ACCUMULATION_STEPS, by which accelerate would scale gradients. "
            "Unset it: microbatch_size decides here."
        )


def check_run_dir(run_dir: Path) -> None:
    """See that the run folder can be written.

    Raises:
        RequestError: it cannot.
    """
    above = (run_dir, *run_dir.absolute().parents)
    nearest = next(folder for folder in above if os.path.exists(folder))  # false, where Path.exists may raise
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        why = "may not be written" if nearest.is_dir() else "is a file"
        raise RequestError(f"run_dir {run_dir} cannot be used: {nearest} {why}. Give another run_dir.")
