"""`python -m train.launch FLAGS -m train --config …`: accelerate's launcher, with signal handling for schedulers.

The flags are the same as for `accelerate launch`. This module handles signals because accelerate does not forward them
to a single process. For several processes, accelerate uses torch's launcher, which does not forward SIGUSR1, kills its
processes 30 s after a SIGTERM, keeps waiting after a second Ctrl-C, and always exits with 1.

`--slurm` (`train/slurm.py`) and `--hosts` (`train/ssh.py`) are other ways to start the processes.
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
from typing import Any

from shards.base.config import load_from_args
from shards.base.errors import INTERRUPTED, Preempted, RequestError, WorkError, exit_code_of, say
from shards.base.stop import STOP_SIGNALS
from train.run.preflight import DEFAULT_SHUTDOWN_SECONDS, LAUNCHER, SHUTDOWN_TIMEOUT
from train.slurm import become_slurm_task
from train.ssh import FORWARD_FLAG, receive_signals, start_launchers

EXAMPLE = "example: python -m train.launch --multi_gpu --num_processes 8 -m train --config configs/phase1.yaml"
UNUSED_SIGNAL = "SIGRTMAX"
"""The only signal that torch's launcher is told to handle, so that it does not replace this module's handlers."""
POLL_SECONDS = 0.05
"""Interval between checks for exited child processes, in seconds."""


class Stopped(BaseException):
    """Raised when the launcher has received a stop signal and its processes have exited.

    It does not derive from Exception, so that `except Exception` in a library does not catch it.
    """


class Shutdown:
    """The launcher's response to a stop signal: stop the processes, wait until they have exited, and raise `Stopped`.

    The processes get SIGTERM, no matter which signal the launcher received. A trainer in the terminal's process group
    has already received a SIGINT from Ctrl-C, and a second SIGINT would end it before it has saved.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first stop signal received, if any."""
        self.interrupts = 0
        """Number of SIGINTs received so far."""
        self.timed_out = False
        """Whether processes were killed because saving took too long."""
        self.exit_codes: list[int] = []
        """Exit codes of the processes. The code is negative if a signal killed the process."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals while the context is open. Under `nohup`, SIGHUP stays ignored."""
        handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, self.handle) for number in handled}
        previous[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, forward_signal)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle(self, number: int, *_: object) -> None:
        """Handle a stop signal.

        The first signal stops the processes and raises `Stopped`. Later signals are ignored, except that a second
        SIGINT kills the processes, so that the first call need not wait any longer.

        Raises:
            Stopped: this is the first signal, and the processes have exited.
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
        """Send SIGTERM to all child processes and wait for them. Kill any that are still running after `seconds`."""
        pids = list(child_processes())
        for pid in pids:
            send(pid, signal.SIGTERM)
        if pids:
            hint = " Press Ctrl-C again to kill it without saving." if self.interrupts else ""
            with suppress(OSError):  # the terminal may be closed
                print(
                    f"{self.name}: waiting up to {seconds:g} s for the run to save.{hint}", file=sys.stderr, flush=True
                )
        deadline = time.monotonic() + seconds
        while None in (codes := [exit_code_of_process(pid) for pid in pids]):
            if time.monotonic() > deadline and not self.timed_out:
                self.timed_out = True
                for pid in pids:
                    send(pid, signal.SIGKILL)
                deadline += seconds
            elif time.monotonic() > deadline:  # even a killed process can hang in the kernel
                break
            time.sleep(POLL_SECONDS)
        self.exit_codes = [code for code in codes if code is not None]

    @property
    def name(self) -> str:
        """Name of the first stop signal."""
        assert self.received is not None
        return self.received.name

    def exit_code(self) -> int:
        """Return the launcher's exit code after a stop signal, and print an error if the run did not save.

        Raises:
            Preempted: the run saved, had nothing to save, or was killed for taking too long, and may be requeued.
        """
        if self.interrupts > 1:
            say(
                WorkError(
                    "Ctrl-C was pressed twice, so the processes were killed. The steps since the newest checkpoint are "
                    "lost. Run the same command again to resume from that checkpoint."
                )
            )
            return INTERRUPTED
        if Preempted.exit_code in self.exit_codes:
            raise Preempted(
                f"The launcher received {self.name}, and the run saved a checkpoint. Run the same command again to "
                f"resume."
            )
        if self.exit_codes and not any(self.exit_codes):
            return 0  # the run finished
        failed = [code for code in self.exit_codes if code > 0 and code != INTERRUPTED]
        if failed:
            return failed[0]
        if self.timed_out:
            raise Preempted(
                f"The launcher received {self.name}, but the run did not exit within {os.environ[SHUTDOWN_TIMEOUT]} s "
                f"and was killed. The steps since the newest checkpoint are lost. Run the same command again to resume "
                f"from that checkpoint. To give the run more time to save, raise {SHUTDOWN_TIMEOUT} (LEAVE with make)."
            )
        killed = [code for code in self.exit_codes if code < 0 and -code not in STOP_SIGNALS]
        if killed:
            raise Preempted(
                f"The launcher received {self.name}, but {signal.Signals(-killed[0]).name} killed a process of the "
                f"run, so the steps since the newest checkpoint are lost. Run the same command again to resume from "
                f"that checkpoint."
            )
        nothing_saved = (
            f"The launcher received {self.name} before the first step, so this launch saved nothing. Run the "
            f"same command again to start from the newest checkpoint, if there is one."
        )
        if self.received == signal.SIGINT:
            say(WorkError(nothing_saved))
            return INTERRUPTED
        raise Preempted(nothing_saved)


def child_processes() -> dict[int, int]:
    """Return a dict from each child's process ID to the bit mask of the signals that it handles (Linux only)."""
    children = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(re.findall(r"^(\w+):\s*(\w+)", status.read_text(errors="replace"), re.MULTILINE))
        except (FileNotFoundError, ProcessLookupError):  # the process has just ended
            continue
        if int(fields["PPid"]) == os.getpid():
            children[int(fields["Pid"])] = int(fields["SigCgt"], 16)
    return children


def send(pid: int, number: int) -> None:
    """Send a signal to a child process, unless the process has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def exit_code_of_process(pid: int) -> int | None:
    """Return the exit code of a child process without reaping it, or None if it is still running.

    The code is negative if a signal killed the process.
    """
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:  # accelerate has already reaped it
        return WorkError.exit_code
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def forward_signal(number: int, *_: object) -> None:
    """Send a signal to the child processes that handle it. It would kill processes that are still starting up."""
    for pid, handled in child_processes().items():
        if handled >> (number - 1) & 1:
            send(pid, number)


def launch(arguments: list[str]) -> int:
    """Start the processes, restart them if one is lost, and return the exit code of the first process to fail.

    Raises:
        Preempted: the launcher received a stop signal, and its processes have exited.
    """
    os.environ.setdefault(SHUTDOWN_TIMEOUT, DEFAULT_SHUTDOWN_SECONDS)
    os.environ["PET_SIGNALS_TO_HANDLE"] = UNUSED_SIGNAL
    os.environ[LAUNCHER] = str(os.getpid())
    shutdown = Shutdown()
    try:
        with shutdown.installed():
            trainer = trainer_arguments(arguments)
            # with several machines, no launcher checks the run: the check could pass on one machine and fail on another
            if trainer is not None and num_machines(arguments) == 1 and (message := check_run(trainer)) is not None:
                print(message)
                return 0
            return start_processes(arguments, shutdown)
    except Stopped:
        return shutdown.exit_code()
    finally:
        del os.environ[LAUNCHER]  # because the caller may train without a launcher afterward


def check_run(trainer: list[str]) -> str | None:
    """Check the run that these trainer arguments would start, and return its final message if it has finished.

    Raises:
        RequestError: the training config is wrong, or an input of the run is missing.
    """
    from train import early
    from train.config import TrainConfig

    config = load_from_args(TrainConfig, trainer, "train", None)
    return early.check_without_torch(config, early.config_file(trainer))


def trainer_arguments(arguments: list[str]) -> list[str] | None:
    """Return the arguments after `-m train`, or None if they request a subcommand or --help instead of a run."""
    for i in range(len(arguments) - 1):
        if arguments[i] in ("-m", "--module") and arguments[i + 1] == "train":
            trainer = arguments[i + 2 :]
            is_run = bool(trainer) and trainer[0].startswith("--") and not {"-h", "--help"} & set(trainer)
            return trainer if is_run else None
    return None


def num_machines(arguments: list[str]) -> int:
    """Return the launcher's `--num_machines`. Without the flag, return 2 if a config file may set it, otherwise 1."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num_machines", "--num-machines", type=int)
    parser.add_argument("--config_file", "--config-file")
    options = parser.parse_known_args(arguments[: arguments.index("train")])[0]
    return options.num_machines or (1 if options.config_file is None else 2)


def start_processes(arguments: list[str], shutdown: Shutdown) -> int:
    """Run accelerate's launcher with these arguments and return the exit code of the first process to fail.

    Raises:
        Stopped: a stop signal arrived.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if shutdown.received is not None:  # one of the imported modules caught `Stopped`
        raise Stopped
    parser = launch_command_parser()
    parser.epilog = EXAMPLE
    options = parser.parse_args(arguments)
    options.quiet = False  # otherwise accelerate replaces the exit code of a single process with 1
    code = 0
    try:
        with restarting_only_lost_processes(shutdown):
            launch_command(options)
    except ChildFailedError as failed:
        code = to_exit_code(failed.get_first_failure()[1].exitcode)
    except subprocess.CalledProcessError as failed:  # accelerate starts a single process without torch's launcher
        code = to_exit_code(failed.returncode)
    if shutdown.received is not None:  # `Stopped` is lost if it is raised in a finalizer
        raise Stopped
    return code


@contextmanager
def restarting_only_lost_processes(shutdown: Shutdown) -> Iterator[None]:
    """While the context is open, torch's launcher does not restart a run that stopped on purpose or was refused.

    Torch's launcher restarts its processes after any exit code but 0. A run can also stop without a signal to this
    launcher: one of its processes received it, or the launcher of another machine did.

    Torch's launcher also stops the other processes then. If one of them has just ended, it raises ProcessLookupError,
    which would hide the exit code; this is suppressed.

    Raises:
        Stopped: a stop signal arrived earlier, but Python discarded the exception because it was raised in a finalizer.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    monitor, stop_process = LocalElasticAgent._monitor_workers, SubprocessHandler.close

    def monitor_workers(agent: LocalElasticAgent, group: Any) -> Any:
        result = monitor(agent, group)
        if shutdown.received is not None:
            raise Stopped
        if {failure.exitcode for failure in result.failures.values()} & {Preempted.exit_code, RequestError.exit_code}:
            agent._remaining_restarts = 0
        return result

    def stop_if_running(*arguments: Any, **options: Any) -> None:
        with suppress(ProcessLookupError):
            stop_process(*arguments, **options)

    LocalElasticAgent._monitor_workers = monitor_workers  # type: ignore[method-assign]
    SubprocessHandler.close = stop_if_running  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalElasticAgent._monitor_workers = monitor  # type: ignore[method-assign]
        SubprocessHandler.close = stop_process  # type: ignore[method-assign]


def to_exit_code(returncode: int) -> int:
    """Convert the return code of a failed process to an exit code.

    The code is 130 if SIGINT (a second Ctrl-C) killed the process, and 1 if a different signal did.
    """
    if returncode == -signal.SIGINT:
        return INTERRUPTED
    return returncode if returncode > 0 else WorkError.exit_code


def launch_on_hosts(arguments: list[str]) -> int:
    """Start launchers over ssh, unless the run has finished, and return the exit code of the first launcher to fail.

    Raises:
        RequestError: the arguments or the training config are wrong, or a machine cannot be reached.
        WorkError: a signal killed a launcher.
    """
    trainer = trainer_arguments(arguments[3:])
    if trainer is not None and (message := check_run(trainer)) is not None:
        print(message)
        return 0
    return start_launchers(arguments)


def main() -> None:
    """Run the launcher from the command line."""
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
