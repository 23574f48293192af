"""`python -m train.launch FLAGS -m train --config …`: accelerate's launcher, as a scheduler needs it.

The flags are those of `accelerate launch`. By itself torch's launcher, which does the work, dies of SIGUSR1 instead of
passing it on, leaves its processes 30 s after a SIGTERM, and ends with 1 whatever happened.

`srun python -m train.launch --slurm -m train --config …` starts nothing: Slurm has started a task for each process.
Each is told by Slurm's variables who it is, and becomes the trainer.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from shards.base.errors import Preempted, RequestError, WorkError, exit_code_of
from train.run.processes import LAUNCHER

EXAMPLE = "example: python -m train.launch --multi_gpu --num_processes 8 -m train --config configs/phase1.yaml"
SLURM_EXAMPLE = "srun python -m train.launch --slurm -m train --config configs/phase1.yaml"
DEFAULTS = {
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    "PET_SHUTDOWN_TIMEOUT": "120",
}
"""Which signals are passed on, and how many seconds the processes then have to save."""


def pass_on(number: int, *_: object) -> None:
    """Send a signal to those child processes that listen to it; one that does not yet would die of it (Linux)."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(re.findall(r"^(\w+):\s*(\w+)", status.read_text(errors="replace"), re.MULTILINE))
            if int(fields["PPid"]) == os.getpid() and int(fields["SigCgt"], 16) >> (number - 1) & 1:
                os.kill(int(fields["Pid"]), number)
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue


def launch(arguments: list[str]) -> int:
    """Start the processes, again where some is lost; returns the exit code that the first one to fail had.

    Raises:
        Preempted: the launcher was told to leave, and so were they.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ[LAUNCHER] = str(os.getpid())
    signal.signal(signal.SIGUSR2, pass_on)
    try:
        parser = launch_command_parser()
        parser.epilog = EXAMPLE
        launch_command(parser.parse_args(arguments))
    except SignalException as told:
        raise Preempted(
            f"the launcher got {told.sigval.name}, and passed it on. The same command again resumes."
        ) from told
    except ChildFailedError as failed:
        return code_of(failed.get_first_failure()[1].exitcode)
    except subprocess.CalledProcessError as failed:  # of one process, which has no launcher of torch's
        return code_of(failed.returncode)
    finally:
        del os.environ[LAUNCHER]  # whoever called goes on without
    return 0


def become_slurm_task(arguments: list[str]) -> None:
    """Replace this process by Python with these arguments, as one of the processes that Slurm started.

    Raises:
        RequestError: it is no task of Slurm's, or there is nothing to start.
    """
    if not arguments:
        raise RequestError(f"--slurm needs what to start: {SLURM_EXAMPLE}")
    os.environ.update(slurm_variables(os.environ))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until the trainer listens
    os.execv(sys.executable, [sys.executable, *arguments])


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What torch's launcher would set, from what `srun` does; a master that is set already stays.

    Raises:
        RequestError: a variable is missing, as in what is no task of `srun`; or no node has a name.
    """
    try:
        rank, size, local_rank = (environment[f"SLURM_{name}"] for name in ("PROCID", "STEP_NUM_TASKS", "LOCALID"))
        shares = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
        found = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": str(shares[int(environment["SLURM_NODEID"])]),
            "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
            # alike for all tasks of a step, and another one for the steps and jobs beside it
            "MASTER_PORT": str(15_000 + (31 * job + step) % 15_000),
        }
    except KeyError as missing:
        raise RequestError(
            f"--slurm reads Slurm's variables, but {missing.args[0]} is not set: this process is no task of srun. "
            f"Start it as {SLURM_EXAMPLE}"
        ) from None
    return found | {name: environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environment}


def tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` → [2, 2, 2, 1]."""
    counts: list[int] = []
    for share, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(share)] * int(times or 1)
    return counts


def first_host(nodes: str) -> str:
    """`gpu[003-010,12],login1` → gpu003."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise RequestError(f"SLURM_STEP_NODELIST is {nodes!r}, which names no host.")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def code_of(returncode: int) -> int:
    """A process's exit code; 1 where a signal ended it."""
    return returncode if returncode > 0 else WorkError.exit_code


def main() -> None:
    """Console entry point."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--slurm"]:
        sys.exit(exit_code_of(lambda: become_slurm_task(arguments[1:])))
    sys.exit(exit_code_of(lambda: launch(arguments)))


if __name__ == "__main__":
    main()
