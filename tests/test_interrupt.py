"""Ctrl-C while a command still imports its modules: one line instead of a traceback, and exit code 130."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.kit.roots import make_root
from tests.runs import train_fields, write_config

COMMANDS = [
    *(["evaluation"], ["evaluation.study"], ["plan"], ["precompute"], ["precompute.download"], ["precompute.preview"]),
    *(["precompute.select"], ["shards"], ["train.launch", "x.py"], ["train", "--config", "CONFIG"]),
]
FIRST_IMPORTS, LATER_IMPORTS = ("numpy", "pyarrow", "pydantic", "torch", "ray"), ("accelerate", "torch")
"""Modules whose import waits for the signal. The commands of `train` import theirs once they have read the config."""
PROGRAM = """
import runpy, sys, time
from importlib import abc

class Slow(abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in {slow}:
            print("importing", flush=True)
            for _ in range(6000):  # a signal that arrives just before a sleep would not end it
                time.sleep(0.1)

sys.meta_path.insert(0, Slow())
sys.argv = {words}
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_ctrl_c_during_the_imports_is_one_line(words: list[str], tmp_path: Path) -> None:
    if "CONFIG" in words:
        root = make_root(tmp_path / "root", {"64x64": [8]})
        words = [*words[:-1], str(write_config(tmp_path, train_fields(root, tmp_path / "run")))]
    slow = LATER_IMPORTS if words[0].startswith("train") else FIRST_IMPORTS
    program = PROGRAM.format(slow=slow, words=words)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    said = "The launcher received SIGINT" if words[0] == "train.launch" else "Interrupted by Ctrl-C."
    assert errors.startswith(f"error: {said}") and errors.count("error: ") == 1 and "Traceback" not in errors, errors
