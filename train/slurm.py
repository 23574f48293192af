"""Running the trainer as a Slurm task: `srun python -m train.launch --slurm -m train --config …`.

Slurm starts one task per process, so there is nothing left to launch. Each task derives its rank from Slurm's
environment variables and then becomes the trainer.
"""

import os
import re
import signal
import sys
from collections.abc import Mapping

from shards.base.errors import RequestError

EXAMPLE = "srun python -m train.launch --slurm -m train --config configs/phase1.yaml"


def become_slurm_task(arguments: list[str]) -> None:
    """Replace this process with a Python process that runs these arguments, in the environment of torch's launcher.

    Raises:
        RequestError: this process was not started by srun, or `arguments` is empty.
    """
    if not arguments:
        raise RequestError(f"--slurm must be followed by the command to run, as in `{EXAMPLE}`.")
    os.environ.update(slurm_variables(os.environ))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until the trainer handles SIGUSR2, it would kill the process
    os.execv(sys.executable, [sys.executable, *arguments])


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Convert srun's environment variables to those of torch's launcher. MASTER_ADDR and MASTER_PORT are kept if set.

    Raises:
        RequestError: a variable is missing because this process was not started by srun, or the node list names no
            host.
    """
    try:
        rank, size, local_rank = (environment[f"SLURM_{name}"] for name in ("PROCID", "STEP_NUM_TASKS", "LOCALID"))
        local_sizes = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
        variables = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": str(local_sizes[int(environment["SLURM_NODEID"])]),
            "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
            # the port is the same for all tasks of a job step, but usually differs between concurrent steps and jobs
            "MASTER_PORT": str(15_000 + (31 * job + step) % 15_000),
        }
    except KeyError as missing:
        raise RequestError(
            f"--slurm reads Slurm's environment variables, but {missing.args[0]} is not set, so this process was not "
            f"started by srun. Start it with srun, as in `{EXAMPLE}`."
        ) from None
    return variables | {name: environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environment}


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node: `2(x3),1` → [2, 2, 2, 1]."""
    counts: list[int] = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeats or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first host of a node list: `gpu[003-010,12],login1` → gpu003.

    Raises:
        RequestError: the list names no host.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise RequestError(
            f"SLURM_STEP_NODELIST is {nodes!r}, which names no host. Start the trainer with srun, as in `{EXAMPLE}`."
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])
