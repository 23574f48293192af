"""The diff in CONTRIBUTING.md is sufficient to add a ninth family."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from plan.config import Plan
from precompute.config import PrecomputeConfig
from shards.base.config import load_config
from tests.families import calls
from tests.families.small import CONFIGS, PIXART, TOKENS, Family, make_small
from tests.families.steps import check_steps, make_case
from train.config import TrainConfig
from train.model.network import class_of

NAME = "pixart-alpha"
# its size embeddings take a third of the width each, and its pipeline needs them at a sample_size of 128
SMALL = PIXART | {"cross_attention_dim": 48, "num_attention_heads": 6, "sample_size": 128}
PARAMETERS = 611_349_152
"""Published: 0.6 B (Chen et al., 2023). This number is that of diffusers' model with this config."""


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """The folder configs/ with the diff applied."""
    folder = Path(shutil.copytree(CONFIGS, tmp_path / "configs"))
    text = (CONFIGS.parent / "CONTRIBUTING.md").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    for name, lines in re.findall(r"\+\+\+ (\S+).*\n((?:\+[^+].*\n)+)", diff):
        assert name.startswith(f"configs/{NAME}/")
        path, content = tmp_path / name, re.sub(r"^\+", "", lines, flags=re.MULTILINE)
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".json":
            sigmas = json.loads((folder / "pixart-sigma" / path.name).read_text())
            content = json.dumps(sigmas | json.loads(f"{{{content}}}"))
        path.write_text(content)
    return folder


def test_its_files(configs: Path) -> None:
    folder = configs / NAME
    stage1 = load_config(PrecomputeConfig, folder / "precompute.yaml", [], "precompute")
    phases = [load_config(TrainConfig, folder / f"phase{phase}.yaml", [], "train") for phase in (1, 2)]
    assert phases[1].init_from == phases[0].run_dir and phases[1].backbone == phases[0].backbone
    plan = load_config(Plan, folder / "plan.yaml", [], "plan")
    for config, planned in zip(phases, plan.phases, strict=True):
        (stream,) = config.data.streams
        assert Path(str(stream.root)).absolute() == stage1.output and stream.bucket in stage1.buckets
        assert (planned.bucket, planned.steps) == (stream.bucket, config.max_steps)
        assert planned.global_batch_size == config.global_batch_size
    assert plan.networks.texts["t5"].max_tokens == stage1.texts["t5"].max_tokens == 120
    fields = json.loads((configs.parent / phases[0].network).read_text())
    with torch.device("meta"):
        network = class_of(fields, phases[0].network).from_config(fields)
    assert sum(parameter.numel() for parameter in network.parameters()) == PARAMETERS


def test_its_steps_are_its_pipelines(configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(calls.OWN, NAME, calls.OWN["pixart-sigma"])
    family = Family(NAME, "kl", {"t5": ("t5", 12)}, SMALL, {"max_tokens": TOKENS}, configs)
    case = make_case(make_small(family, tmp_path / "small"))
    assert {"resolution", "aspect_ratio"} <= case.loss.backbone.arguments(
        case.loss.latents.conditioning(case.batch, torch.zeros(4, dtype=torch.bool)), (4, 4)
    )["added_cond_kwargs"].keys()
    check_steps(case)
