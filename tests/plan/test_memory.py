"""`python -m plan --memory`: its table, and requests that it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from plan.__main__ import run
from plan.memory import describe, variants
from shards.base.config import load_config
from shards.base.errors import exit_code_of
from train.config import TrainConfig
from train.memory import step_settings

PLAN = ["--config", "configs/pixart-sigma/plan.yaml"]


def training_config(folder: Path, **changes: Any) -> str:
    """Write phase 1 of PixArt-Σ with two blocks, and return its path."""
    fields = json.loads(Path("configs/pixart-sigma/backbone.json").read_text())
    fields["num_layers"] = 2
    (folder / "backbone.json").write_text(json.dumps(fields))
    config = {"base": str(Path("configs/pixart-sigma/phase1.yaml").resolve()), "compile": False, "microbatch_size": 32}
    path = folder / "phase1.yaml"
    path.write_text(yaml.safe_dump(config | {"backbone": {"config": str(folder / "backbone.json")}} | changes))
    return str(path)


@pytest.mark.heavy
def test_a_row_for_each_way_to_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sharded = {"sharding": "full", "sharding_group": 8}
    config = training_config(tmp_path, microbatch_size=1, gradient_checkpointing=0.5, **sharded)
    run([*PLAN, "--gpus", "16", "--memory", config])
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines() if "phase1.yaml" in line]
    assert shown.startswith("Memory of each GPU in GiB, on 16 GPUs")
    assert [row[1:6] for row in rows] == [
        ["1", "sharding", "full", "over", "8,"],
        ["1", "sharding", "full", "over", "8,"],
    ]
    assert rows[0][6:8] == ["checkpointing", "50%"] and rows[1][6] == "checkpointing"
    half, checkpointing = (float(row[-6]) for row in rows)
    assert half >= checkpointing > 0
    half, checkpointing = (float(row[-5]) for row in rows)
    assert 0 < half < checkpointing
    assert rows[0][-1] == "all"


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        (False, ["", "checkpointing 50%", "checkpointing"]),
        (0.25, ["checkpointing 25%", "checkpointing 50%", "checkpointing"]),
        (0.5, ["checkpointing 50%", "checkpointing"]),
        (True, ["checkpointing"]),
    ],
)
def test_more_checkpointing_than_configured(configured: bool | float, expected: list[str], tmp_path: Path) -> None:
    config = load_config(TrainConfig, training_config(tmp_path, gradient_checkpointing=configured), [], "train")
    assert [describe(settings) for settings in variants(step_settings(config, 8))] == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([*PLAN, "--gpus", "7"], "7"),
        (["--config", "configs/sdxl/plan.yaml"], "does not fit the encoders of the plan. Pass the plan of the same"),
        ([*PLAN, "--out", "somewhere"], "cannot be combined with --compare or --out"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert exit_code_of(lambda: run([*arguments, "--memory", training_config(tmp_path)])) == 2
    assert expected in " ".join(capsys.readouterr().err.split())
