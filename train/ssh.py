"""Starting a launcher on each of several machines over ssh: `python -m train.launch --hosts hosts.txt 2 8 -m train …`.

Signals are forwarded to the launchers through the standard input of ssh, with one signal name per line. If this process
dies, that input is closed, and each launcher stops its processes.
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
from shards.base.table import counted
from train.run.preflight import DEFAULT_SHUTDOWN_SECONDS, SHUTDOWN_TIMEOUT

EXAMPLE = "python -m train.launch --hosts hosts.txt 2 8 -m train --config configs/phase1.yaml"
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
SSH_FAILED = 255
"""Exit code of ssh if ssh itself fails."""
KILLED_BY = 128
"""Offset in a shell's exit code: the shell exits with this plus the number of the signal that killed its command."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are forwarded to the launchers on the other machines."""
FORWARD_FLAG = "--signals-from-stdin"
"""Internal flag of a launcher that receives signals through its standard input."""


def start_launchers(arguments: list[str]) -> int:
    """Start a launcher on each machine, in the current folder, and return the exit code of the first one to fail.

    Args:
        arguments: the hosts file, the number of hosts to use, the number of processes per host, and the arguments
            of a launcher.

    Raises:
        RequestError: the arguments are wrong, or a machine cannot be reached.
        WorkError: a signal killed a launcher.
    """
    hosts, processes_per_host, rest = parse_arguments(arguments)
    if shutil.which(SSH[0]) is None:
        raise RequestError("--hosts needs ssh, which is not installed. Install the OpenSSH client.")
    running = {}
    for rank, host in enumerate(hosts):
        launcher = shlex.join(launcher_command(hosts, rank, processes_per_host) + rest)
        # a shell runs the launcher, because ssh exits with SSH_FAILED if a signal kills the remote command
        command = [*SSH, host, f"cd {shlex.quote(os.getcwd())} && exec sh -c {shlex.quote(f'{launcher}; exit $?')}"]
        # in its own session, because Ctrl-C in the terminal would end ssh but not the remote launcher
        running[host] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def forward(number: int, *_: object) -> None:
        for process in running.values():
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # ssh has ended
                os.write(process.stdin.fileno(), f"{signal.Signals(number).name}\n".encode())

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        return first_failure(running, forward)
    finally:
        for process in running.values():
            process.communicate()
        for number, handler in previous.items():
            signal.signal(number, handler)


def parse_arguments(arguments: list[str]) -> tuple[list[str], int, list[str]]:
    """Split the arguments of `--hosts` into the hosts, the number of processes per host, and a launcher's arguments.

    Raises:
        RequestError: the arguments are wrong, or the file names too few hosts.
    """
    if len(arguments) < 4 or not all(word.isdecimal() and int(word) for word in arguments[1:3]):
        raise RequestError(
            f"--hosts must be followed by a hosts file, the number of hosts and the number of processes per host, as "
            f"in `{EXAMPLE}`."
        )
    file, num_hosts, processes_per_host = arguments[0], int(arguments[1]), int(arguments[2])
    hosts = read_hosts(Path(file))[:num_hosts]
    if len(hosts) < num_hosts:
        raise RequestError(
            f"The hosts file {file} names {counted(len(hosts), 'host')}, but --hosts requests "
            f"{num_hosts}. Add hosts to the file or request fewer."
        )
    return hosts, processes_per_host, arguments[3:]


def launcher_command(hosts: Sequence[str], rank: int, processes_per_host: int) -> list[str]:
    """Return the command of the launcher on `hosts[rank]`, without the arguments that all launchers share."""
    shutdown_seconds = os.environ.get(SHUTDOWN_TIMEOUT, DEFAULT_SHUTDOWN_SECONDS)
    num_processes = len(hosts) * processes_per_host
    options = {
        "num_machines": len(hosts),
        "machine_rank": rank,
        "main_process_ip": os.environ.get("MASTER_ADDR", hosts[0].rpartition("@")[2]),
        "main_process_port": os.environ.get("MASTER_PORT", "29500"),
        "num_processes": num_processes,
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    multi_gpu = ["--multi_gpu"] if num_processes > 1 else []
    launcher = ["env", f"{SHUTDOWN_TIMEOUT}={shutdown_seconds}", sys.executable, "-m", "train.launch"]
    return [*launcher, FORWARD_FLAG, *flags, *multi_gpu]


def read_hosts(path: Path) -> list[str]:
    """Read a file with one host per line, each a destination for ssh such as `user@host`. `#` starts a comment.

    Raises:
        RequestError: the file cannot be read, a line is not a host name, or a host appears twice.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file in UTF-8"
        raise RequestError(
            f"The hosts file {path} cannot be read: {reason}. Pass a file with one host per line."
        ) from None
    hosts = [line for line in lines if line]
    for host in hosts:
        if not re.fullmatch(r"[\w.@:-]+", host) or host.startswith("-"):
            raise RequestError(
                f"The hosts file {path} contains {host!r}, which is not a host name. Write one host name per line."
            )
        if hosts.count(host) > 1:
            raise RequestError(f"The hosts file {path} names the host {host!r} twice. Remove one of the lines.")
    return hosts


def first_failure(running: Mapping[str, subprocess.Popen[bytes]], forward: Callable[[int], None]) -> int:
    """Wait for all launchers, and return the exit code of the first launcher to fail, or 0 if none fails.

    When a launcher fails, all launchers receive SIGTERM, unless it exited because it was preempted.

    Raises:
        RequestError: a machine could not be reached.
        WorkError: a signal killed a launcher.
    """
    failure: tuple[str, int] | None = None
    while True:
        codes = {host: process.poll() for host, process in running.items()}
        if failure is None:
            failure = next(((host, code) for host, code in codes.items() if code), None)
            if failure is not None and failure[1] != Preempted.exit_code:
                forward(signal.SIGTERM)
        if None not in codes.values():
            break
        time.sleep(0.1)
    if failure is None:
        return 0
    host, code = failure
    if code == SSH_FAILED:
        raise RequestError(
            f"ssh could not reach {host}, or lost the connection (see above). `ssh {host} true` must work without a "
            f"password, and this folder must exist at the same path on {host}. Run the same command again to resume."
        )
    if code in (INTERRUPTED, -signal.SIGINT):
        return INTERRUPTED  # the launcher has printed the reason
    if code > KILLED_BY:
        raise WorkError(
            f"The launcher on {host} was killed by signal {code - KILLED_BY}. Signal 9 often means that the machine "
            f"ran out of memory. Saved checkpoints remain valid; run the same command again to resume."
        )
    return code if code > 0 else WorkError.exit_code


def receive_signals() -> None:
    """Start a thread that sends this process the signals named on its standard input, and SIGTERM when that ends."""

    def listen() -> None:
        for line in sys.stdin:
            os.kill(os.getpid(), signal.Signals[line.strip()])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, daemon=True, name="signals").start()
