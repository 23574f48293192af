"""Run `make`, or commands up to their actual work, from tests."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ranks import environment

ROOT = Path(__file__).parents[1]


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `make …` as from a shell."""
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment())


class UnderstoodError(Exception):
    """The arguments were parsed, and the actual work would begin."""


def then_stop(read: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `read` to raise UnderstoodError when it returns."""

    def stop(*arguments: Any) -> Any:
        read(*arguments)
        raise UnderstoodError

    return stop
