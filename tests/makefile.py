"""Run `make` from tests."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `make …` as from a shell, without the flags and ARGS that `make test` would pass on."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "ARGS"))}
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment)
