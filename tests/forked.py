"""`python -m …` in processes that begin with the libraries imported, which is most of what a small run does.

A server that has imported them, and nothing of the product, forks for each command. The fork runs it as Python runs a
module: with its own arguments, environment and folder, and the exit that it has.
"""

import atexit
import functools
import importlib
import json
import os
import runpy
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIBRARIES = (
    "accelerate.tracking",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.unets.unet_2d_condition",
    "diffusers.schedulers",
    "fsspec",
    "pyarrow.parquet",
    "pydantic_settings",
    "rich.progress",
    "safetensors.torch",
    "scipy.stats",
    "torch.distributed.fsdp",
    "torchvision",
    "yaml",
)


class Server:
    """The process that forks; it ends with this one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        command, pipe = [sys.executable, "-m", "tests.forked"], subprocess.PIPE
        # unbuffered, so that what `select` does not see has not been read
        self.process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, env=environment)
        atexit.register(self.process.kill)

    def run(self, arguments: list[str], environment: Mapping[str, str], timeout: float) -> tuple[int, str, str]:
        """Exit status as `subprocess` has it, standard output and standard error of `python -m arguments`."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            self._send(
                {"argv": arguments, "env": dict(environment), "cwd": os.getcwd(), "out": f"{out}", "err": f"{err}"}
            )
            pid = self._receive(None)
            try:
                status = self._receive(timeout)
            except TimeoutError:
                os.kill(pid, 9)
                self._receive(None)
                raise subprocess.TimeoutExpired(arguments, timeout, out.read_bytes(), err.read_bytes()) from None
            return os.waitstatus_to_exitcode(status), out.read_text(), err.read_text()

    def _send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")

    def _receive(self, timeout: float | None) -> int:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            raise TimeoutError
        return int(self.process.stdout.readline())


@functools.cache
def server() -> Server:
    """Of this process."""
    from tests.runs import environment

    return Server(environment())


def serve() -> list[str]:
    """Fork for each request that comes; returns in the forks alone, with the arguments."""
    for name in LIBRARIES:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        if (pid := os.fork()) == 0:
            _become(request)
            argv: list[str] = request["argv"]
            return argv
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)
    sys.exit()


def _become(request: dict[str, Any]) -> None:
    for number, name in enumerate((os.devnull, request["out"], request["err"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    sys.stdin = os.fdopen(0)  # the server's has read ahead
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]


if __name__ == "__main__":
    sys.argv = serve()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
