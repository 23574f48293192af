"""Real kills, and errors of the disk, between each two steps of a commit; a disk that is full; two runs at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import environment


def steps(folder: Path, models: Path, every: int) -> dict[str, dict]:
    """What `tests.faults.steps` found; it fails where anything is not as it should be."""
    command = [sys.executable, "-m", "tests.faults.steps", str(folder), str(models), str(every)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_step(models: Path, tmp_path: Path, report: dict[str, object]) -> None:
    report["steps"] = steps(tmp_path, models, every=1)


def test_some_steps(models: Path, tmp_path: Path, report: dict[str, object]) -> None:
    report["steps"] = steps(tmp_path, models, every=29)
