"""Commands forked from a server that has imported everything, so a start takes only a second; several are a run's
ranks. The server is itself a fork of pytest's process.

Each is a separate process with its own environment, session, log and resource tracker, like a process started by
`python -m train`; only the imports are shared. Nodes are simulated: each has a private /dev/shm and temporary
folder, so that nothing but the network is shared.
"""

import atexit
import ctypes
import gc
import math
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import forkserver, get_context, resource_tracker, set_start_method, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from botocore.session import get_session

from shards.base.errors import exit_code_of
from shards.base.pool import die_with

SERVER = get_context("forkserver")
COMMANDS = (
    "precompute.__main__",
    "evaluation.commands",
    "evaluation.report.commands",
    "train.__main__",
    "train.start",
    "train.export.pipeline",
)
LAUNCHERS = ("train.launch", "accelerate.commands.launch", "torch.distributed.run")
IMPORTED_LATER = (
    "torch.distributed.tensor",
    "torch._dynamo",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "s3fs",
    "tests.evaluation.watch.watching",
)
"""Modules that the commands import only when they need them, which is in almost every test."""
IMPORTED = ("tests.ranks", *COMMANDS, *LAUNCHERS, *IMPORTED_LATER)
SERVER.set_forkserver_preload(list(IMPORTED))

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x00020000, 0x4000, 1 << 18
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def fork_server() -> None:
    """Fork the server from this process, in place of a new interpreter that would import everything again.

    Call this after the tests have been imported, but before the first one runs. Commands also do at their exit what
    this process has registered until then, so no test module may create a temporary folder when it is imported.
    """

    def fork(path: str, arguments: list[str], passed: list[int]) -> int:
        if pid := os.fork():
            return pid
        try:
            listener, alive = passed
            die_with(os.getppid())  # because a fork holds both ends of the pipe `alive`
            select.select([listener], [], [])  # import the rest only if a test asks for a process
            for name in IMPORTED:
                import_module(name)
            let_botocore_parse()
            gc.freeze()
            forkserver.main(listener, alive, [])
        finally:
            os._exit(1)

    resource_tracker.ensure_running()
    with patch.object(util, "spawnv_passfds", fork):
        forkserver.ensure_running()


def let_botocore_parse() -> None:
    """Create an S3 client, so that forks of this process share the files that botocore parses (tests/fixtures.py)."""
    get_session().create_client("s3", "us-east-1", aws_access_key_id="none", aws_secret_access_key="none")


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without the variables of a launcher, a cluster and `make test ARGS=…`.

    `ray.init` sets RAY_AUTH_MODE=token. A Ray that was imported before that, as in the server, would start a cluster
    that requires a token, but not send one.
    """
    others = (*LAUNCHER, "RAY_ADDRESS", "RAY_AUTH_MODE", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS")
    kept = {key: value for key, value in os.environ.items() if key not in others}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | variables


def start(
    log: Path,
    arguments: list[str],
    num_processes: int = 1,
    num_nodes: int = 1,
    program: str = "train.__main__:run",
    errors: Path | None = None,
    variables: Mapping[str, str] = {},
) -> list[ForkServerProcess]:
    """Start `python -m train ARGUMENTS` on several processes; return a `Process` per rank, or per node.

    Args:
        log: file for the output.
        program: `module:function` to call with the arguments instead of the trainer's.
        errors: file for standard error only.
        variables: additional environment variables.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    local = num_processes // num_nodes
    common = {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(local)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for node in range(num_nodes):
        ranks = [
            common | {"RANK": str(node * local + i), "LOCAL_RANK": str(i)} if num_processes > 1 else {}
            for i in range(local)
        ]
        for group in [ranks] if num_nodes > 1 else [[rank] for rank in ranks]:
            shared = Path(tempfile.mkdtemp(prefix="node-")) if num_nodes > 1 else None
            here = (os.getcwd(), environment(**variables))
            process = SERVER.Process(
                target=_run_ranks, args=(log, errors or log, here, program, arguments, group, shared)
            )
            process.start()
            processes.append(process)
    return processes


def run(log: Path, arguments: list[str], num_processes: int = 1, num_nodes: int = 1, seconds: float = 600) -> str:
    """Start, wait for success, and return what was printed."""
    processes = start(log, arguments, num_processes, num_nodes)
    codes = wait(processes, seconds)
    assert codes == [0] * len(processes), f"exit codes {codes}:\n{log.read_text()[-5000:]}"
    return log.read_text()


def run_command(
    program: str, arguments: list[str], num_processes: int = 1, seconds: float = 600, variables: Mapping[str, str] = {}
) -> tuple[int, str, str]:
    """Return the exit code (the highest of several processes), standard output and standard error."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        processes = start(output, arguments, num_processes, program=program, errors=errors, variables=variables)
        codes = [code for code in wait(processes, seconds) if code is not None]
        said = output.read_text(), errors.read_text()
        assert len(codes) == num_processes, f"killed after {seconds:g} s:\n{said[0]}\n{said[1]}"
        return (max(codes, key=abs), *said)


def wait(processes: list[ForkServerProcess], seconds: float = 600) -> list[int | None]:
    """Return the exit codes in order. Processes that have not exited after `seconds` are killed, and their code is
    None."""
    codes: list[int | None] = []
    for process in processes:
        process.join(seconds)
        codes.append(process.exitcode)
        if process.exitcode is None:
            process.kill()
            process.join()
    return codes


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def nodes_can_be_simulated() -> bool:
    """Return whether this process may give a child a private /dev/shm."""
    process = SERVER.Process(target=_own_shared_memory)
    process.start()
    process.join()
    return process.exitcode == 0


def _run_ranks(
    log: Path,
    errors: Path,
    here: tuple[str, dict[str, str]],
    program: str,
    arguments: list[str],
    ranks: list[dict[str, str]],
    node: Path | None,
) -> None:
    os.setsid()
    random.seed()  # otherwise all forks of a server would draw the same numbers, including Ray's ports
    os.chdir(here[0])
    os.environ.clear()
    os.environ.update(here[1])
    set_start_method("fork", force=True)  # for loader workers, as in a process that was not forked by a server
    for number, path in ((1, log), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    if node is not None:
        _own_shared_memory()
        os.environ["TMPDIR"] = str(node)
        tempfile.tempdir = None
    children = [pid for variables in ranks[1:] if (pid := _fork_rank(program, arguments, variables))]
    code = _run_rank(program, arguments, ranks[0])
    for pid in children:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or code
    sys.exit(code)


def _fork_rank(program: str, arguments: list[str], variables: dict[str, str]) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(_run_rank(program, arguments, variables))
    return pid


def _run_rank(program: str, arguments: list[str], variables: dict[str, str]) -> int:
    for name in LAUNCHER:
        os.environ.pop(name, None)
    os.environ.update(variables)
    _forget_resource_tracker()
    module, _, function = program.partition(":")
    called = getattr(__import__(module, fromlist=[function]), function)
    code = exit_code_of(lambda: called(arguments))
    atexit._run_exitfuncs()  # a forked process skips this
    return code


def _forget_resource_tracker() -> None:
    """Clean up after this process only, as in a process that was not forked."""
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._pid = None  # type: ignore[attr-defined]


def launch(arguments: list[str]) -> None:
    """Run `python -m train.launch ARGUMENTS`, whose processes are forked instead of starting Python again."""
    import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as handler

    from train import launch

    real = subprocess.Popen

    def popen(args: Sequence[str], **options: Any) -> Any:
        return ForkedPython(args, real, **options) if args[0] == sys.executable else real(args, **options)

    subprocess.Popen = handler.Popen = popen  # type: ignore[assignment,misc]
    sys.argv[1:] = arguments
    for number in (signal.SIGHUP, signal.SIGINT):  # ignored if the tests run under nohup, or in a script's background
        signal.signal(number, signal.SIG_DFL)
    launch.main()


class ForkedPython:
    """Stand-in for the `subprocess.Popen` of `python -m MODULE …` or `python SCRIPT …` that forks this process."""

    def __init__(self, args: Sequence[str], real: Any, env: dict[str, str], start_new_session: bool = False, **_: Any):
        self.args, self.returncode = args, None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            subprocess.Popen = real  # type: ignore[misc]
            if start_new_session:
                os.setsid()
            os._exit(_run_python([word for word in args[1:] if word != "-u"], env))

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None  # type: ignore[assignment]
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int | None:
        """Wait for the process, and return its exit code."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(list(self.args), timeout)
            time.sleep(0.02)
        return self.returncode


def _run_python(words: list[str], variables: dict[str, str]) -> int:
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(variables)
    _forget_resource_tracker()
    is_module, code = words[0] == "-m", 0
    sys.argv = words[is_module:]
    try:
        if is_module:
            sys.modules.pop(f"{words[1]}.__main__", None)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _own_shared_memory() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    failed = (
        libc.unshare(CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)
    )
    if failed:
        raise OSError(ctypes.get_errno(), "no /dev/shm of its own")
