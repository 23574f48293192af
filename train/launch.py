"""`python -m train.launch FLAGS -m train --config …`: accelerate's launcher, as a scheduler needs it.

The flags are those of `accelerate launch`. By itself torch's launcher, which does the work, dies of SIGUSR1 instead of
passing it on, leaves its processes 30 s after a SIGTERM, and ends with 1 whatever happened.

`srun python -m train.launch --slurm -m train --config …` starts nothing: Slurm has started a task for each process.
Each is told by Slurm's variables who it is, and becomes the trainer.

`python -m train.launch --hosts hosts.txt 2 8 FLAGS -m train --config …` starts a launcher of eight processes on each of
the file's first two machines, by ssh. Through ssh's pipe each is told of signals, and that this one is gone.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
HOSTS_EXAMPLE = "python -m train.launch --hosts hosts.txt 2 8 -m train --config configs/phase1.yaml"
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
NOT_REACHED = 255
"""ssh's exit code where it is ssh that failed."""
ENDED_BY = 128
"""A shell's exit code for what a signal ended, less the signal's number."""
TOLD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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


def launch_on_hosts(arguments: list[str]) -> int:
    """Start a launcher on each machine by ssh, in this folder; returns the exit code of the first one to fail.

    Args:
        arguments: the file of hosts, how many of them, processes on each, and what a launcher there is to be given.

    Raises:
        RequestError: they are something else, or a machine cannot be reached.
    """
    if len(arguments) < 4 or not all(word.isdecimal() and int(word) for word in arguments[1:3]):
        raise RequestError(f"--hosts needs a file of hosts, how many, processes on each: {HOSTS_EXAMPLE}")
    file, machines, processes = arguments[0], int(arguments[1]), int(arguments[2])
    hosts = read_hosts(Path(file))[:machines]
    if len(hosts) < machines:
        raise RequestError(f"{file} names {len(hosts)} hosts, and {machines} are asked for.")
    if shutil.which(SSH[0]) is None:
        raise RequestError("--hosts needs ssh, which is not here. Install OpenSSH's client.")
    running = {}
    for rank, host in enumerate(hosts):
        words = shlex.join(launcher_on(hosts, rank, processes) + arguments[3:])
        # by a shell, as ssh's own code is NOT_REACHED, too, for what a signal ended
        command = [*SSH, host, f"cd {shlex.quote(os.getcwd())} && exec sh -c {shlex.quote(f'{words}; exit $?')}"]
        # in a session of its own: a terminal's Ctrl-C would end ssh, and not what it started
        running[host] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def tell(number: int, *_: object) -> None:
        for process in running.values():
            with suppress(BrokenPipeError):  # it has ended
                os.write(process.stdin.fileno(), f"{signal.Signals(number).name}\n".encode())  # type: ignore[union-attr]

    before = {number: signal.signal(number, tell) for number in TOLD}
    try:
        return first_failure(running, tell)
    finally:
        for process in running.values():
            process.communicate()
        for number, handler in before.items():
            signal.signal(number, handler)


def launcher_on(hosts: Sequence[str], rank: int, processes: int) -> list[str]:
    """What is typed on one of the machines, but for the flags that all have."""
    leave = os.environ.get("PET_SHUTDOWN_TIMEOUT", DEFAULTS["PET_SHUTDOWN_TIMEOUT"])
    master = os.environ.get("MASTER_ADDR", hosts[0].rpartition("@")[2])
    several = {
        "num_machines": len(hosts),
        "machine_rank": rank,
        "main_process_ip": master,
        "main_process_port": os.environ.get("MASTER_PORT", "29500"),
        "num_processes": len(hosts) * processes,
    }
    flags = [word for name, value in several.items() for word in (f"--{name}", str(value))]
    multi = ["--multi_gpu"] if len(hosts) * processes > 1 else []
    return ["env", f"PET_SHUTDOWN_TIMEOUT={leave}", sys.executable, "-m", "train.launch", "--told", *flags, *multi]


def read_hosts(path: Path) -> list[str]:
    """A host to a line, as ssh takes it; `#` begins a remark.

    Raises:
        RequestError: there is no such file, or a line is no host, or the same as another.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    except OSError as error:
        raise RequestError(
            f"The file of hosts {path} cannot be read: {error.strerror}. It has a host to a line."
        ) from None
    hosts = [line for line in lines if line]
    for host in hosts:
        if not re.fullmatch(r"[\w.@:-]+", host) or host.startswith("-") or hosts.count(host) > 1:
            raise RequestError(f"{path} names {host!r}, which is no host, or twice. A line is a host's name, no more.")
    return hosts


def first_failure(running: Mapping[str, subprocess.Popen[bytes]], tell: Callable[[int], None]) -> int:
    """Wait for all; where one fails, the others are told to leave, but when it left because it was told itself.

    Raises:
        RequestError: a machine could not be reached.
        WorkError: a signal ended a launcher.
    """
    failed: tuple[str, int] | None = None
    while True:
        codes = {host: process.poll() for host, process in running.items()}
        wrong = next(((host, code) for host, code in codes.items() if code), None)
        if failed is None and wrong is not None:
            failed = wrong
            if wrong[1] != Preempted.exit_code:
                tell(signal.SIGTERM)
        if None not in codes.values():
            break
        time.sleep(0.1)
    if failed is not None and failed[1] == NOT_REACHED:
        raise RequestError(
            f"{failed[0]} was not reached, or lost, by ssh (see above). `ssh {failed[0]} true` must work without a "
            f"password, and this folder must be there under the same path. The same command again resumes."
        )
    if failed is not None and failed[1] > ENDED_BY:
        raise WorkError(
            f"The launcher on {failed[0]} was ended by signal {failed[1] - ENDED_BY}; where that is 9, by the kernel "
            f"for want of memory, perhaps. What is saved stays valid: the same command again resumes."
        )
    return 0 if failed is None else code_of(failed[1])


def hear_launcher() -> None:
    """Send this process the signals that come by its standard input, and SIGTERM at its end."""

    def listen() -> None:
        for line in sys.stdin:
            os.kill(os.getpid(), signal.Signals[line.strip()])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, daemon=True, name="told").start()


def code_of(returncode: int) -> int:
    """A process's exit code; 1 where a signal ended it."""
    return returncode if returncode > 0 else WorkError.exit_code


def main() -> None:
    """Console entry point."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--slurm"]:
        sys.exit(exit_code_of(lambda: become_slurm_task(arguments[1:])))
    if arguments[:1] == ["--hosts"]:
        sys.exit(exit_code_of(lambda: launch_on_hosts(arguments[1:])))
    if arguments[:1] == ["--told"]:
        hear_launcher()
        arguments = arguments[1:]
    sys.exit(exit_code_of(lambda: launch(arguments)))


if __name__ == "__main__":
    main()
