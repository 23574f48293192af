"""`python -m train.launch FLAGS -m train --config …`: accelerate's launcher with signals that suit a scheduler.

The flags are those of `accelerate launch`. This module handles the signals, because accelerate does not forward them to
a single process, and torch's launcher, which starts several, does not forward SIGUSR1, kills its processes 30 s after a
SIGTERM, keeps waiting after a second Ctrl-C, and always exits with 1.

`--slurm` (`train/slurm.py`) and `--hosts` (`train/ssh.py`) start the processes in other ways.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shards.base.config import load_from_args
from shards.base.errors import INTERRUPTED, Preempted, WorkError, exit_code_of, say
from train.run.preflight import DEFAULT_SHUTDOWN_SECONDS, LAUNCHER, SHUTDOWN_TIMEOUT
from train.slurm import become_slurm_task
from train.ssh import FORWARD_FLAG, receive_signals, start_launchers

EXAMPLE = "example: python -m train.launch --multi_gpu --num_processes 8 -m train --config configs/phase1.yaml"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
UNUSED_SIGNAL = "SIGRTMAX"
"""The only signal that torch's launcher may handle. Otherwise its handlers would replace those of this module."""
POLL_SECONDS = 0.05


class Stopped(BaseException):
    """The launcher received a stop signal, and its processes have exited. Not an Exception, so no module catches it."""


class Shutdown:
    """The launcher's reaction to a stop signal: forward it, wait for the processes to exit, raise `Stopped`.

    The processes always get SIGTERM. A trainer in the terminal's process group has already received Ctrl-C, and a
    second SIGINT would end it before it has saved.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first stop signal."""
        self.interrupts = 0
        """Number of SIGINTs received so far."""
        self.timed_out = False
        """Whether processes were killed because saving took too long."""
        self.exit_codes: list[int] = []
        """The processes' exit codes; negative if a signal killed the process."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals within the context. SIGHUP stays ignored under `nohup`."""
        numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle) for number in numbers}
        before[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, pass_on)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle(self, number: int, *_: object) -> None:
        """Stop the processes and raise `Stopped`; on a second SIGINT kill them, so that the first call returns.

        Raises:
            Stopped: all processes have exited.
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
        """Send SIGTERM to all child processes and wait for them; kill those that are left after `seconds`."""
        pids = list(child_processes())
        if pids:
            hint = " Press Ctrl-C again to end it now." if self.interrupts else ""
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
            elif time.monotonic() > deadline:  # a killed process may hang in the kernel
                break
            time.sleep(POLL_SECONDS)
        self.exit_codes = [code for code in codes if code is not None]

    @property
    def name(self) -> str:
        """Name of the first stop signal."""
        assert self.received is not None
        return self.received.name

    def exit_code(self) -> int:
        """Print what the signal led to and return the launcher's exit code.

        Raises:
            Preempted: the run saved, or had nothing to save, and a scheduler may start it again.
        """
        if self.interrupts > 1:
            say(
                WorkError(
                    "Interrupted twice by Ctrl-C: the processes were killed, and the steps since the newest checkpoint "
                    "are lost. The same command resumes from that checkpoint."
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
                f"({SHUTDOWN_TIMEOUT}; LEAVE of make) and was killed. The steps since the newest checkpoint are lost. "
                f"The same command resumes from that checkpoint. Raise {SHUTDOWN_TIMEOUT} to give the run time to save."
            )
        unsaved = (
            f"the launcher received {self.name} before the first step, so this launch saved nothing. The same "
            f"command starts again, from the newest checkpoint if there is one."
        )
        if self.received == signal.SIGINT:
            say(WorkError(unsaved))
            return INTERRUPTED
        raise Preempted(unsaved)


def child_processes() -> dict[int, int]:
    """Return the id of each child process → bit mask of the signals that it handles (Linux only)."""
    children = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(re.findall(r"^(\w+):\s*(\w+)", status.read_text(errors="replace"), re.MULTILINE))
        except (FileNotFoundError, ProcessLookupError):  # it has ended in the meantime
            continue
        if int(fields["PPid"]) == os.getpid():
            children[int(fields["Pid"])] = int(fields["SigCgt"], 16)
    return children


def send(pid: int, number: int) -> None:
    """Send a signal to a child process, unless the process has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def exit_code_of_process(pid: int) -> int | None:
    """Return a child's exit code, negative if a signal killed it, or None while it runs. The child is not reaped."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:  # accelerate has already reaped it
        return WorkError.exit_code
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def pass_on(number: int, *_: object) -> None:
    """Send a signal to the child processes that handle it. It would kill one that does not handle it yet."""
    for pid, handled in child_processes().items():
        if handled >> (number - 1) & 1:
            send(pid, number)


def launch(arguments: list[str]) -> int:
    """Start the processes, restart them if one is lost, and return the exit code of the first one to fail.

    Raises:
        Preempted: the launcher received a stop signal, and its processes have exited.
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
        del os.environ[LAUNCHER]  # the caller may use the trainer without a launcher afterwards


def answer_early(arguments: list[str]) -> str | None:
    """Return the final message of a finished run, if the arguments start one on this machine only.

    With several machines nothing is checked here, because all launchers must come to the same answer.

    Raises:
        RequestError: the training config is wrong, or something that it names is missing.
    """
    words = trainer_arguments(arguments)
    if words is None or num_machines(arguments) > 1:
        return None
    return answer_trainer(words)


def answer_trainer(words: list[str]) -> str | None:
    """Return the final message, if these arguments of the trainer name a finished run.

    Raises:
        RequestError: the training config is wrong, or something that it names is missing.
    """
    from train import early
    from train.config import TrainConfig

    return early.answer_early(load_from_args(TrainConfig, words, "train", None), early.config_file(words))


def trainer_arguments(arguments: list[str]) -> list[str] | None:
    """Return the arguments of `-m train`; None: the command is a subcommand, its help, or not the trainer."""
    for i in range(len(arguments) - 1):
        if arguments[i] in ("-m", "--module") and arguments[i + 1] == "train":
            words = arguments[i + 2 :]
            is_run = bool(words) and words[0].startswith("--") and not {"-h", "--help"} & set(words)
            return words if is_run else None
    return None


def num_machines(arguments: list[str]) -> int:
    """Return the launcher's `--num_machines`, or 2 if it may be set in a config file of accelerate."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num_machines", "--num-machines", type=int)
    parser.add_argument("--config_file", "--config-file")
    given = parser.parse_known_args(arguments[: arguments.index("train")])[0]
    return given.num_machines or (1 if given.config_file is None else 2)


def start_processes(arguments: list[str], shutdown: Shutdown) -> int:
    """Run accelerate's launcher with these arguments and return the exit code of the first process to fail.

    Raises:
        Stopped: a stop signal arrived before the processes were started.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if shutdown.received is not None:  # a module caught `Stopped` while it was imported
        raise Stopped
    parser = launch_command_parser()
    parser.epilog = EXAMPLE
    options = parser.parse_args(arguments)
    options.quiet = False  # otherwise accelerate replaces a single process's exit code with 1
    try:
        launch_command(options)
    except ChildFailedError as failed:
        return code_of(failed.get_first_failure()[1].exitcode)
    except subprocess.CalledProcessError as failed:  # accelerate starts a single process without torch's launcher
        return code_of(failed.returncode)
    return 0


def code_of(returncode: int) -> int:
    """Return the exit code to use for a process: 130 if SIGINT killed it (a second Ctrl-C), 1 for any other signal."""
    if returncode == -signal.SIGINT:
        return INTERRUPTED
    return returncode if returncode > 0 else WorkError.exit_code


def launch_on_hosts(arguments: list[str]) -> int:
    """Start launchers by ssh, unless the run has finished; return the exit code of the first one to fail.

    Raises:
        RequestError: the arguments or the training config are wrong, or a machine cannot be reached.
        WorkError: a signal killed a launcher.
    """
    trainer = trainer_arguments(arguments[3:])
    if trainer is not None and (answer := answer_trainer(trainer)) is not None:
        print(answer)
        return 0
    return start_launchers(arguments)


def main() -> None:
    """Console entry point."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--slurm"]:
        sys.exit(exit_code_of(lambda: become_slurm_task(arguments[1:])))
    if arguments[:1] == ["--hosts"]:
        sys.exit(exit_code_of(lambda: launch_on_hosts(arguments[1:])))
    if arguments[:1] == [FORWARD_FLAG]:
        receive_signals()
        arguments = arguments[1:]
    sys.exit(exit_code_of(lambda: launch(arguments)))


if __name__ == "__main__":
    main()
