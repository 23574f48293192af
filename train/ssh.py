"""Starting a launcher on each of several machines by ssh: `python -m train.launch --hosts hosts.txt 2 8 -m train …`.

Signals are forwarded to the launchers through ssh's standard input, line by line. When the pipe closes, because this
process is gone, a launcher stops its processes.
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

from shards.base.errors import INTERRUPTED, Preempted, RequestError, WorkError
from train.run.preflight import DEFAULT_SHUTDOWN_SECONDS, SHUTDOWN_TIMEOUT

EXAMPLE = "python -m train.launch --hosts hosts.txt 2 8 -m train --config configs/phase1.yaml"
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
SSH_FAILED = 255
"""ssh's exit code if ssh itself failed."""
KILLED_BY = 128
"""Offset of a signal's number in a shell's exit code."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are forwarded to the launchers on the other machines."""
FORWARD_FLAG = "--told"
"""Flag of a launcher that receives signals through its standard input."""


def start_launchers(arguments: list[str]) -> int:
    """Start a launcher on each machine, in this folder, and wait; return the exit code of the first one to fail.

    Args:
        arguments: the file of hosts, how many of them to use, processes per host, and the arguments of a launcher.

    Raises:
        RequestError: the arguments are wrong, or a machine cannot be reached.
        WorkError: a signal killed a launcher.
    """
    hosts, processes, rest = parse_arguments(arguments)
    if shutil.which(SSH[0]) is None:
        raise RequestError("--hosts needs ssh, which is not installed. Install OpenSSH's client.")
    running = {}
    for rank, host in enumerate(hosts):
        words = shlex.join(launcher_command(hosts, rank, processes) + rest)
        # run by a shell, because ssh exits with SSH_FAILED if a signal kills the remote command
        command = [*SSH, host, f"cd {shlex.quote(os.getcwd())} && exec sh -c {shlex.quote(f'{words}; exit $?')}"]
        # in a session of its own, because a terminal's Ctrl-C would end ssh but not the launcher that it started
        running[host] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def forward(number: int, *_: object) -> None:
        for process in running.values():
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended
                os.write(process.stdin.fileno(), f"{signal.Signals(number).name}\n".encode())

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        return first_failure(running, forward)
    finally:
        for process in running.values():
            process.communicate()
        for number, handler in before.items():
            signal.signal(number, handler)


def parse_arguments(arguments: list[str]) -> tuple[list[str], int, list[str]]:
    """Split the arguments of `--hosts` into the hosts to use, processes per host, and the arguments of a launcher.

    Raises:
        RequestError: the arguments are wrong, or the file names too few hosts.
    """
    if len(arguments) < 4 or not all(word.isdecimal() and int(word) for word in arguments[1:3]):
        raise RequestError(
            f"--hosts must be followed by a file of hosts, the number of hosts and the number of processes per host: "
            f"{EXAMPLE}"
        )
    file, num_hosts, processes = arguments[0], int(arguments[1]), int(arguments[2])
    hosts = read_hosts(Path(file))[:num_hosts]
    if len(hosts) < num_hosts:
        raise RequestError(
            f"{file} names {len(hosts)} hosts, but {num_hosts} were requested. Add hosts or request fewer."
        )
    return hosts, processes, arguments[3:]


def launcher_command(hosts: Sequence[str], rank: int, processes: int) -> list[str]:
    """Return the command of the launcher on host number `rank`, without the arguments that all launchers share."""
    leave = os.environ.get(SHUTDOWN_TIMEOUT, DEFAULT_SHUTDOWN_SECONDS)
    options = {
        "num_machines": len(hosts),
        "machine_rank": rank,
        "main_process_ip": os.environ.get("MASTER_ADDR", hosts[0].rpartition("@")[2]),
        "main_process_port": os.environ.get("MASTER_PORT", "29500"),
        "num_processes": len(hosts) * processes,
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    multi = ["--multi_gpu"] if len(hosts) * processes > 1 else []
    python = ["env", f"{SHUTDOWN_TIMEOUT}={leave}", sys.executable, "-m", "train.launch"]
    return [*python, FORWARD_FLAG, *flags, *multi]


def read_hosts(path: Path) -> list[str]:
    """Read a file with one host per line, as ssh takes it. `#` starts a comment.

    Raises:
        RequestError: the file cannot be read, or a line is not a host name or names a host twice.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    except OSError as error:
        raise RequestError(
            f"The file of hosts {path} cannot be read: {error.strerror}. It must contain one host per line."
        ) from None
    hosts = [line for line in lines if line]
    for host in hosts:
        if not re.fullmatch(r"[\w.@:-]+", host) or host.startswith("-"):
            raise RequestError(f"{path} contains {host!r}, which is not a host name. Write one host name per line.")
        if hosts.count(host) > 1:
            raise RequestError(f"{path} names the host {host!r} twice. Remove one of the lines.")
    return hosts


def first_failure(running: Mapping[str, subprocess.Popen[bytes]], forward: Callable[[int], None]) -> int:
    """Wait for all launchers and return the exit code of the first one to fail, or 0.

    Once one fails, the others are told to stop, unless it stopped because of a signal that all of them received.

    Raises:
        RequestError: a machine could not be reached.
        WorkError: a signal killed a launcher.
    """
    failed: tuple[str, int] | None = None
    while True:
        codes = {host: process.poll() for host, process in running.items()}
        wrong = next(((host, code) for host, code in codes.items() if code), None)
        if failed is None and wrong is not None:
            failed = wrong
            if wrong[1] != Preempted.exit_code:
                forward(signal.SIGTERM)
        if None not in codes.values():
            break
        time.sleep(0.1)
    if failed is None:
        return 0
    host, code = failed
    if code == SSH_FAILED:
        raise RequestError(
            f"ssh could not reach {host}, or lost the connection (see above). `ssh {host} true` must work without a "
            f"password, and this folder must exist there under the same path. The same command resumes the run."
        )
    if code in (INTERRUPTED, -signal.SIGINT):
        return INTERRUPTED  # the launcher has printed the reason
    if code > KILLED_BY:
        raise WorkError(
            f"The launcher on {host} was killed by signal {code - KILLED_BY}. If that is 9, the machine may have run "
            f"out of memory. What is saved stays valid: the same command resumes the run."
        )
    return code if code > 0 else WorkError.exit_code


def receive_signals() -> None:
    """Send this process the signals that arrive through its standard input, and SIGTERM when the input closes."""

    def listen() -> None:
        for line in sys.stdin:
            os.kill(os.getpid(), signal.Signals[line.strip()])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, daemon=True, name="signals").start()
