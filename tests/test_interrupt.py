"""Ctrl-C while a command still imports its modules: one line instead of a traceback, and exit code 130."""

import signal
import subprocess
import sys

import pytest

COMMANDS = [
    *("evaluation", "evaluation.study", "plan", "precompute", "precompute.download", "precompute.preview"),
    *("precompute.select", "shards"),
]
"""The commands of `train` are tested in tests/train/test_launch.py."""
PROGRAM = """
import runpy, sys, time
from importlib import abc

class Slow(abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("numpy", "pyarrow", "pydantic", "torch", "ray"):
            print("importing", flush=True)
            time.sleep(600)

sys.meta_path.insert(0, Slow())
runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_during_the_imports_is_one_line(command: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors.splitlines()[0].startswith("error: Interrupted by Ctrl-C.") and "Traceback" not in errors, errors
