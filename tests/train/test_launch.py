"""Slurm's variables as the launcher reads them; without a launcher, several tasks are refused."""

import os
import sys
from pathlib import Path

import pytest

from shards.base.errors import RequestError, exit_code_of
from tests.runs import train_fields, write_config
from train import launch
from train.__main__ import run

STEP = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[003-004,012],login1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NODEID": "3",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "64",  # of the whole job
}


def test_a_task_of_srun_is_told_who_it_is() -> None:
    assert launch.slurm_variables(STEP) == {
        "RANK": "6",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "gpu003",
        "MASTER_PORT": str(15_000 + (31 * 1234567 + 2) % 15_000),
    }
    second = launch.slurm_variables(STEP | {"SLURM_NODEID": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"})
    assert second["LOCAL_WORLD_SIZE"] == "2"
    assert (second["MASTER_ADDR"], second["MASTER_PORT"]) == ("head", "29500")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[1-4]", "gpu1"),
        ("gpu[09,10-12],cpu[1-2]", "gpu09"),
        ("rack[2-3]-node[010-020]", "rack2-node010"),
        ("a-[1].site.org,b", "a-1.site.org"),
    ],
)
def test_the_master_is_the_first_node(nodes: str, first: str) -> None:
    assert launch.first_host(nodes) == first


@pytest.mark.parametrize(("text", "counts"), [("8", [8]), ("8(x2)", [8, 8]), ("2(x3),1,4(x2)", [2, 2, 2, 1, 4, 4])])
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert launch.tasks_per_node(text) == counts


@pytest.mark.parametrize("missing", [name for name in STEP if name != "SLURM_NTASKS"])
def test_what_is_no_task_of_srun_is_refused(missing: str) -> None:
    rest = {name: value for name, value in STEP.items() if name != missing}
    with pytest.raises(RequestError, match=rf"{missing} is not set: .* Start it as srun python -m train"):
        launch.slurm_variables(rest)


def test_a_task_becomes_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same process goes on as it, so that Slurm's signals reach it."""
    monkeypatch.setattr(os, "environ", dict(STEP))
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: became.append([path, *arguments[1:]]))
    monkeypatch.setattr(sys, "argv", ["train.launch", "--slurm", "-m", "train", "--config", "a.yaml"])
    with pytest.raises(SystemExit) as left:
        launch.main()
    assert left.value.code == 0
    assert became == [[sys.executable, "-m", "train", "--config", "a.yaml"]]
    assert os.environ["RANK"] == "6" and os.environ["WORLD_SIZE"] == "7"


def test_tasks_that_know_nothing_of_each_other_are_refused(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, train_fields(latents, tmp_path / "run"))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "7")
    assert exit_code_of(lambda: run(["--config", str(config)])) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "srun started 7 tasks, but WORLD_SIZE is not set: each would train alone, in one run folder" in message
    assert "`srun python -m train.launch --slurm -m train --config" in message
    assert not (tmp_path / "run").exists()
