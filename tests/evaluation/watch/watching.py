"""`evaluation watch` without Ray and without further processes: here, or in a process of its own that can be killed."""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from evaluation.__main__ import run as command
from shards.base.errors import RequestError, WorkError, exit_code_of
from tests.ranks import SERVER
from train.__main__ import run as train


def run_here(units: Sequence[tuple[str, Any]], function: Callable[..., Any], *rest: object) -> None:
    """In place of Ray."""
    for _, unit in units:
        function(unit, 1, lambda count: None)


RUN_ELSEWHERE = subprocess.run


def train_here(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """In place of `python -m train …`; other commands run as ever."""
    if words[1:3] != ["-m", "train"]:
        return RUN_ELSEWHERE(words, **options)
    said = StringIO()
    try:
        with redirect_stdout(said):
            train(words[3:])
    except (RequestError, WorkError) as error:
        return subprocess.CompletedProcess(words, 1, "", f"error: {error}")
    return subprocess.CompletedProcess(words, 0, said.getvalue(), "")


def stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in this process."""
    monkeypatch.setattr("evaluation.features.job.run_units", run_here)
    monkeypatch.setattr("evaluation.sampling.job.run_units", run_here)
    monkeypatch.setattr("subprocess.run", train_here)


def watch(run_dir: Path | str, words: list[str], *more: str) -> int:
    """The command; its exit code."""
    return exit_code_of(lambda: command(["watch", str(run_dir), *words, *more]))


def watcher(run_dir: Path, words: list[str], dies_at: str | None = None) -> BaseProcess:
    """The same in a process, which has begun; `dies_at`: the function at whose call it is gone."""
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
    """evaluations.jsonl."""
    return [json.loads(line) for line in (place / "evaluations.jsonl").read_text().splitlines()]


def numbers(place: Path) -> list[tuple[Any, ...]]:
    """Of evaluations.jsonl, without where the run lay."""
    return [tuple(row[name] for name in ("step", "set", "metric", "id", "value", "low")) for row in written(place)]
