"""Run `evaluation watch` without Ray: in this process, or in one that can be killed."""

import json
import os
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from evaluation.__main__ import run as command
from shards.base.errors import exit_code_of
from tests.evaluation.sets import run_here
from tests.ranks import SERVER


def stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace Ray's workers by calls in this process."""
    monkeypatch.setattr("evaluation.features.job.run_units", run_here)
    monkeypatch.setattr("evaluation.sampling.job.run_units", run_here)


def watch(run_dir: Path | str, words: list[str], *more: str) -> int:
    """Run `evaluation watch` and return its exit code."""
    return exit_code_of(lambda: command(["watch", str(run_dir), *words, *more]))


def watcher(run_dir: Path, words: list[str], dies_at: str | None = None) -> BaseProcess:
    """Start `evaluation watch` in a process.

    Args:
        dies_at: dotted path of a function; the process exits with code 9 when it is called.
    """
    process = SERVER.Process(target=_watch, args=(run_dir, words, dies_at))
    process.start()
    return process


def _watch(run_dir: Path, words: list[str], dies_at: str | None) -> None:
    monkeypatch = pytest.MonkeyPatch()
    stay_here(monkeypatch)
    if dies_at is not None:
        monkeypatch.setattr(dies_at, lambda *_: os._exit(9))
    os._exit(watch(run_dir, words))


def written(place: Path) -> list[dict[str, Any]]:
    """Return the rows of evaluations.jsonl."""
    return [json.loads(line) for line in (place / "evaluations.jsonl").read_text().splitlines()]


def numbers(place: Path) -> list[tuple[Any, ...]]:
    """Return the values in evaluations.jsonl, without the run's path."""
    return [tuple(row[name] for name in ("step", "set", "metric", "id", "value", "low")) for row in written(place)]
