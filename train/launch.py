"""`python -m train.launch FLAGS -m train --config …`: accelerate's launcher, as a scheduler needs it.

The flags are those of `accelerate launch`. Signals are handled here: accelerate does not pass them on to a single
process, and torch's launcher, which starts several, does not pass on SIGUSR1, kills its processes 30 s after a SIGTERM,
waits even after a second Ctrl-C, and exits with 1 whatever happened.

`srun python -m train.launch --slurm -m train --config …` starts nothing: Slurm has started a task for each process.
Each is told by Slurm's variables who it is, and becomes the trainer.

`python -m train.launch --hosts hosts.txt 2 8 FLAGS -m train --config …` starts a launcher of eight processes on each of
the file's first two machines, by ssh. Through ssh's pipe each is told of signals, and that this one is gone.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from shards.base.config import load_from_args
from shards.base.errors import INTERRUPTED, Preempted, RequestError, WorkError, exit_code_of, say
from train.run.preflight import LAUNCHER

EXAMPLE = "example: python -m train.launch --multi_gpu --num_processes 8 -m train --config configs/phase1.yaml"
SLURM_EXAMPLE = "srun python -m train.launch --slurm -m train --config configs/phase1.yaml"
SHUTDOWN_TIMEOUT = "PET_SHUTDOWN_TIMEOUT"
"""Environment variable: seconds that the processes have to save and exit after a signal. torch reads it as well."""
DEFAULT_SHUTDOWN_SECONDS = "120"
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
UNUSED_SIGNAL = "SIGRTMAX"
"""The only signal left to torch's launcher, whose handlers would replace those of this module."""
POLL_SECONDS = 0.05
HOSTS_EXAMPLE = "python -m train.launch --hosts hosts.txt 2 8 -m train --config configs/phase1.yaml"
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
NOT_REACHED = 255
"""ssh's exit code where it is ssh that failed."""
ENDED_BY = 128
"""A shell's exit code for what a signal ended, less the signal's number."""
TOLD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Stopped(BaseException):
    """The launcher received a signal to leave, and its processes have exited. No `except Exception` may catch it."""


class Shutdown:
    """The launcher's reaction to a signal to leave: forward it, wait until the processes have exited, raise `Stopped`.

    Processes get SIGTERM, whichever signal the launcher got: a trainer in the terminal's process group has received
    Ctrl-C already, and a second SIGINT would end it before it has saved.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal."""
        self.interrupts = 0
        """Number of SIGINTs received."""
        self.timed_out = False
        """Whether processes were killed because they took too long to save."""
        self.exit_codes: list[int] = []
        """The processes' exit codes; negative for one that a signal ended."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals within the context. SIGHUP stays ignored under `nohup`."""
        numbers = [number for number in LEAVE_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle) for number in numbers}
        before[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, pass_on)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle(self, number: int, *_: object) -> None:
        """Stop the processes and raise `Stopped`; at a second SIGINT kill them, and let the first call return.

        Raises:
            Stopped: all of them have exited.
        """
        self.interrupts += number == signal.SIGINT
        if self.interrupts > 1:
            for pid in child_processes():
                send(pid, signal.SIGKILL)
        if self.received is not None:
            return
        self.received = signal.Signals(number)
        self.stop_processes(float(os.environ[SHUTDOWN_TIMEOUT]))
        raise Stopped

    def stop_processes(self, seconds: float) -> None:
        """Send SIGTERM to all child processes and wait for them; kill those that remain after `seconds`."""
        pids = list(child_processes())
        if pids:
            hint = " Ctrl-C again ends them at once." if self.interrupts else ""
            print(f"{self.name}: waiting up to {seconds:g} s for the run to save.{hint}", file=sys.stderr, flush=True)
        for pid in pids:
            send(pid, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while None in (codes := [exit_code_of_process(pid) for pid in pids]):
            if time.monotonic() > deadline and not self.timed_out:
                self.timed_out = True
                for pid in pids:
                    send(pid, signal.SIGKILL)
                deadline += seconds
            elif time.monotonic() > deadline:  # a process may hang in the kernel
                break
            time.sleep(POLL_SECONDS)
        self.exit_codes = [code for code in codes if code is not None]

    @property
    def name(self) -> str:
        """The first signal's name."""
        assert self.received is not None
        return self.received.name

    def exit_code(self) -> int:
        """Say what the signal led to; return the launcher's exit code.

        Raises:
            Preempted: the run saved; or it had nothing to save, and a scheduler may start it again.
        """
        if self.interrupts > 1:
            say(
                WorkError(
                    "Interrupted twice by Ctrl-C: the processes were killed. Steps since the newest checkpoint are "
                    "lost; the same command resumes from there."
                )
            )
            return INTERRUPTED
        if Preempted.exit_code in self.exit_codes:
            raise Preempted(f"the launcher received {self.name} and the run saved. The same command resumes it.")
        if self.exit_codes and not any(self.exit_codes):
            return 0  # the run finished
        failed = [code for code in self.exit_codes if code > 0 and code != INTERRUPTED]
        if failed:
            return failed[0]
        if self.timed_out:
            raise Preempted(
                f"the launcher received {self.name}, but the run did not exit within {os.environ[SHUTDOWN_TIMEOUT]} s "
                f"({SHUTDOWN_TIMEOUT}; LEAVE of make) and was killed. Steps since the newest checkpoint are lost; the "
                f"same command resumes from there."
            )
        unsaved = (
            f"the launcher received {self.name} before the first step: this launch saved nothing. The same command "
            f"starts again, from the newest checkpoint if there is one."
        )
        if self.received == signal.SIGINT:
            say(WorkError(unsaved))
            return INTERRUPTED
        raise Preempted(unsaved)


def child_processes() -> dict[int, int]:
    """Map each child process's id to the mask of signals that it handles (Linux)."""
    children = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(re.findall(r"^(\w+):\s*(\w+)", status.read_text(errors="replace"), re.MULTILINE))
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if int(fields["PPid"]) == os.getpid():
            children[int(fields["Pid"])] = int(fields["SigCgt"], 16)
    return children


def send(pid: int, number: int) -> None:
    """Send a signal to a child process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def exit_code_of_process(pid: int) -> int | None:
    """Return a child's exit code, negative for one that a signal ended; None while it runs. It is not reaped."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:  # reaped before it could be asked
        return WorkError.exit_code
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def pass_on(number: int, *_: object) -> None:
    """Send a signal to the child processes that handle it; one that does not yet would die of it."""
    for pid, handled in child_processes().items():
        if handled >> (number - 1) & 1:
            send(pid, number)


def launch(arguments: list[str]) -> int:
    """Start the processes, and again if one is lost; return the exit code of the first one to fail.

    Raises:
        Preempted: the launcher received a signal to leave, and its processes have left.
    """
    os.environ.setdefault(SHUTDOWN_TIMEOUT, DEFAULT_SHUTDOWN_SECONDS)
    os.environ["PET_SIGNALS_TO_HANDLE"] = UNUSED_SIGNAL
    os.environ[LAUNCHER] = str(os.getpid())
    shutdown = Shutdown()
    try:
        with shutdown.installed():
            if (answer := answer_early(arguments)) is not None:
                print(answer)
                return 0
            return start_processes(arguments, shutdown)
    except Stopped:
        return shutdown.exit_code()
    finally:
        del os.environ[LAUNCHER]  # the caller may go on without a launcher


def answer_early(arguments: list[str]) -> str | None:
    """Return the message of a finished run, if the arguments start one on this machine alone.

    Launchers of several machines do not look, since what one of them finds must hold for all.

    Raises:
        RequestError: the training config is wrong, or something that it names is missing.
    """
    words = trainer_arguments(arguments)
    if words is None or num_machines(arguments) > 1:
        return None
    return answer_trainer(words)


def answer_trainer(words: list[str]) -> str | None:
    """Return the message of a finished run, if these arguments of the trainer name one.

    Raises:
        RequestError: the training config is wrong, or something that it names is missing.
    """
    from train import early
    from train.config import TrainConfig

    return early.answer_early(load_from_args(TrainConfig, words, "train", None), early.config_file(words))


def trainer_arguments(arguments: list[str]) -> list[str] | None:
    """The arguments of `-m train`; None: something else is started, a subcommand, or its help."""
    for i in range(len(arguments) - 1):
        if arguments[i] in ("-m", "--module") and arguments[i + 1] == "train":
            words = arguments[i + 2 :]
            is_run = bool(words) and words[0].startswith("--") and not {"-h", "--help"} & set(words)
            return words if is_run else None
    return None


def num_machines(arguments: list[str]) -> int:
    """The launcher's `--num_machines`; 2 if a file of accelerate's may say so."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num_machines", "--num-machines", type=int)
    parser.add_argument("--config_file", "--config-file")
    given = parser.parse_known_args(arguments[: arguments.index("train")])[0]
    return given.num_machines or (1 if given.config_file is None else 2)


def start_processes(arguments: list[str], shutdown: Shutdown) -> int:
    """Hand the arguments to accelerate's launcher; return the exit code of the first process to fail.

    Raises:
        Stopped: a signal to leave came before the processes were started.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if shutdown.received is not None:  # some module caught `Stopped` while it was imported
        raise Stopped
    parser = launch_command_parser()
    parser.epilog = EXAMPLE
    options = parser.parse_args(arguments)
    options.quiet = False  # which would replace a single process's exit code by 1
    try:
        launch_command(options)
    except ChildFailedError as failed:
        return code_of(failed.get_first_failure()[1].exitcode)
    except subprocess.CalledProcessError as failed:  # a single process, which accelerate starts without torch
        return code_of(failed.returncode)
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
    asked = trainer_arguments(arguments[3:])
    if asked is not None and (answer := answer_trainer(asked)) is not None:
        print(answer)
        return 0
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
    leave = os.environ.get(SHUTDOWN_TIMEOUT, DEFAULT_SHUTDOWN_SECONDS)
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
    if failed is not None and failed[1] == INTERRUPTED:
        return INTERRUPTED  # the launcher has said so
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
    """A process's exit code; where a signal ended it, 130 for SIGINT (a second Ctrl-C) and 1 for any other."""
    if returncode == -signal.SIGINT:
        return INTERRUPTED
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
