"""The evaluation commands in the docs have valid arguments. Nothing is executed."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from evaluation import commands as drawing
from evaluation.__main__ import run
from evaluation.report import commands as reporting
from evaluation.study import __main__ as study
from tests.makefile import UnderstoodError, make, then_stop

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/evaluation.md", "docs/how-to/study.md")
COMMAND = re.compile(r"make (sample|evaluate|watch|report|study) |\S*python -m evaluation")
RUNS: dict[str, Callable[[list[str]], None]] = {"evaluation": run, "evaluation.study": study.run}


def commands() -> list[list[str]]:
    """Return the words of each evaluation command in the code blocks of the docs."""
    blocks = [block for page in PAGES for block in re.findall(r"```\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)]
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if COMMAND.match(line)]


def modules(words: list[str]) -> list[list[str]]:
    """Return the evaluation modules that a command runs, each followed by its arguments."""
    if words[0] != "make":
        return [words[2:]]
    dry_run = make("--dry-run", *words[1:])
    assert dry_run.returncode == 0, dry_run.stderr
    lines = [shlex.split(line) for line in dry_run.stdout.replace("\\\n", "").splitlines() if "-m evaluation" in line]
    return [line[line.index("-m") + 1 :] for line in lines]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_in_the_docs_have_valid_arguments(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "load_from_args", then_stop(drawing.load_from_args))
    monkeypatch.setattr(reporting, "load_config", then_stop(reporting.load_config))
    monkeypatch.setattr(reporting, "read_runs", then_stop(lambda names: names))
    monkeypatch.setattr(study, "load_config", then_stop(study.load_config))
    found = modules(words)
    assert found
    for module, *arguments in found:
        with pytest.raises(UnderstoodError):
            RUNS[module](arguments)
