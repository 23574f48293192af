"""`--help` of every command describes it and shows valid examples."""

import importlib
import re
import shlex
import tomllib
from pathlib import Path

import pytest

import evaluation.__main__
import evaluation.study.__main__
import shards.__main__
import train.__main__
from tests.makefile import UnderstoodError, then_stop

ROOT = Path(__file__).parents[1]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
WITHOUT_SCRIPT = ("evaluation.study", "precompute.preview", "train.launch")
PROGRAMS = {
    place.split(":")[0].removesuffix(".__main__") for name, place in SCRIPTS.items() if name != "latentmill"
} | set(WITHOUT_SCRIPT)
SUBCOMMANDS = {
    "evaluation": set(evaluation.__main__.COMMANDS) - {"study"},  # has a separate table
    "evaluation.study": set(evaluation.study.__main__.COMMANDS),
    "shards": set(shards.__main__.COMMANDS),
    "train": {"check", *train.__main__.COMMANDS},
}
WORDS = [["latentmill"], ["latentmill", "init"]]
WORDS += [["python", "-m", program] for program in sorted(PROGRAMS)]
WORDS += [["python", "-m", program, name] for program, names in sorted(SUBCOMMANDS.items()) for name in sorted(names)]

READ = [
    *(f"{program}.load_from_args" for program in ("evaluation.commands", "precompute.__main__", "train.__main__")),
    *(f"precompute.{name}.__main__.load_from_args" for name in ("select", "download")),
    *(f"{name}.load_config" for name in ("evaluation.report.commands", "evaluation.study.__main__", "plan.__main__")),
    *(f"train.{name}.load_for_run" for name in ("export.pipeline", "export.posthoc", "run.reporting.notify")),
]
"""Functions that parse the arguments."""
WORK = [
    *("shards.__main__.open_store", "precompute.preview.open_store", "shards.tools.init.write_configs"),
    "train.export.push.read_card",
    *(
        "train.run.reporting.plot.plot_run",
        "accelerate.commands.launch.launch_command",
        "evaluation.report.commands.read_runs",
    ),
]
"""Functions that start the actual work in commands that use argparse."""


def call(words: list[str]) -> None:
    """Run a command in this process."""
    if words[0] == "latentmill":
        importlib.import_module("shards.tools.init").run(words[1:])
        return
    name = words[2]
    module = importlib.import_module(f"{name}.__main__" if hasattr(importlib.import_module(name), "__path__") else name)
    (module.launch if name == "train.launch" else module.run)(words[3:])


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        call([*words, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_every_command_has_examples_that_are_understood(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # accelerate's launcher folds lines
    printed = help_of(words, capsys)
    shown = re.search(r"^examples?:(.*?)(?:\n\n|\Z)", printed, re.DOTALL | re.MULTILINE)
    assert shown is not None, printed
    # comments follow a wide gap
    lines = [re.split(r" {3,}", line.strip())[0] for line in shown[1].splitlines()]
    examples = [shlex.split(line) for line in lines if line]
    assert examples[0][: len(words)] == words, "its own come first"

    monkeypatch.chdir(ROOT)
    for place in READ:
        module, _, name = place.rpartition(".")
        monkeypatch.setattr(place, then_stop(getattr(importlib.import_module(module), name)))
    for place in WORK:
        monkeypatch.setattr(place, then_stop(lambda *_: None))
    monkeypatch.setattr("train.early.check_without_torch", lambda *_: None)  # the inputs of the examples do not exist
    for example in examples:
        with pytest.raises(UnderstoodError):
            call(example)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("latentmill", list(SCRIPTS)),
        ("precompute", ["precompute.select", "precompute.download", "precompute.preview", "--limits.max_pixels"]),
        ("precompute.select", ["--metadata"]),
        ("precompute.download", ["--recheck"]),
        ("precompute.preview", ["--samples"]),
        ("plan", ["--gpus", "--compare"]),
        (
            "train",
            ["train check", "train plot", "train export", "train ema", "train tell", "train.launch", "--optimizer.lr"],
        ),
        ("train check", ["print the step from which a", "--data.num_workers"]),
        ("train plot", ["loss.png"]),
        ("train export", ["--weights"]),
        ("train ema", ["--std"]),
        ("train.launch", ["--num_processes"]),
        ("evaluation", [f"evaluation {name}" for name in evaluation.__main__.COMMANDS]),
        ("evaluation sample", ["--sampling.guidance"]),
        ("evaluation score", ["--extractors.clip.weights"]),
        ("evaluation watch", ["--every", "--once"]),
        ("evaluation report", ["--price_per_hour"]),
        ("evaluation study", [f"evaluation.study {name}" for name in evaluation.study.__main__.COMMANDS]),
        ("evaluation.study serve", ["evaluation.study invite", "--serve.port"]),
        ("shards", list(shards.__main__.COMMANDS)),
        *((f"shards {name}", ["root"]) for name in shards.__main__.COMMANDS),
    ],
)
def test_help_names(words: str, said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    printed = help_of(words.split() if words == "latentmill" else ["python", "-m", *words.split()], capsys)
    for word in said:
        assert word in printed


def test_watch_does_not_list_the_step_that_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """`score`, from which it inherits its other fields, does."""
    assert "--step" in help_of(["python", "-m", "evaluation", "score"], capsys)
    assert "--step" not in help_of(["python", "-m", "evaluation", "watch"], capsys)
