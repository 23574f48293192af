"""The shipped families: valid files, published sizes, and no family names in the code."""

import ast
import inspect
import re
from pathlib import Path

import diffusers
import pytest
import torch
import yaml

from plan.config import Plan
from precompute.config import PrecomputeConfig
from shards.base.config import load_config
from shards.base.durable import read_json
from tests.families.small import CONFIGS, FAMILIES
from tests.rooms import modules
from train.config import TrainConfig
from train.model.network import CLASSES, class_name, class_of

PARAMETERS = {
    "sd2": 865_910_724,
    "sd15": 859_520_964,
    "sdxl": 2_567_463_684,
    "pixart-sigma": 610_856_096,
    "sd3": 2_028_328_000,
    "flux1": 11_901_408_320,
    "sana": 1_604_462_752,
    "prx": 1_170_691_648,
}
"""Published: SDXL 2.6 B (Podell et al., 2023), PixArt 0.6 B (Chen et al., 2023), SD3 medium 2 B, FLUX.1 12 B and SANA
1.6 B (their model cards), PRX 1.2 B (Photoroom's posts); these numbers are of diffusers' models of those configs."""
NAMES = re.compile(r"sdxl|pixart|sd3|flux1|\bflux\b|sana|\bprx\b", re.IGNORECASE)


def test_there_are_eight() -> None:
    assert {path.parent.name for path in CONFIGS.glob("*/precompute.yaml")} == FAMILIES.keys() == PARAMETERS.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_files_of_a_family(name: str) -> None:
    stage1 = load_config(PrecomputeConfig, CONFIGS / name / "precompute.yaml", [], "precompute")
    one, two = (load_config(TrainConfig, CONFIGS / name / f"phase{phase}.yaml", [], "train") for phase in (1, 2))
    assert two.init_from == one.run_dir and two.network == one.network
    assert two.backbone.called == one.backbone.called
    for config in (one, two):
        (stream,) = config.data.streams
        assert Path(str(stream.root)).absolute() == stage1.output and stream.bucket in stage1.buckets
    towers = one.backbone.text_towers or ["text"]
    assert set(towers) <= set(stage1.texts) and set(one.backbone.pipeline.towers) <= set(stage1.texts)
    fields = read_json(CONFIGS.parent / one.network)
    with torch.device("meta"):
        network = class_of(fields, one.network).from_config(fields)
    assert sum(parameter.numel() for parameter in network.parameters()) == PARAMETERS[name]
    hidden = {name: tower.masked for name, tower in stage1.texts.items() if tower.masked or tower.trim}
    assert not hidden or one.backbone.states.mask


def test_every_class_is_some_familys() -> None:
    """Every supported class belongs to a tested family."""
    paths = [load_config(TrainConfig, CONFIGS / name / "phase1.yaml", [], "train").network for name in FAMILIES]
    assert {class_name(read_json(CONFIGS.parent / path)) for path in paths} == CLASSES.keys()


def test_sanas_instruction_is_its_pipelines() -> None:
    called = inspect.signature(diffusers.SanaPipeline.__call__).parameters
    (tower,) = yaml.safe_load((CONFIGS / "sana" / "precompute.yaml").read_text())["texts"].values()
    assert tower["template"] == "\n".join(called["complex_human_instruction"].default) + "{}"
    assert tower["max_tokens"] == called["max_sequence_length"].default - 2 and tower["beyond_template"]
    assert tower["keep"] == [[0, 1], [-called["max_sequence_length"].default + 1, None]]


@pytest.mark.parametrize(
    ("name", "pipeline", "tower"),
    [
        ("pixart-sigma", "PixArtSigmaPipeline", "t5"),
        ("sd3", "StableDiffusion3Pipeline", "t5"),
        ("flux1", "FluxPipeline", "t5"),
    ],
)
def test_captions_are_as_long_as_the_pipelines(name: str, pipeline: str, tower: str) -> None:
    called = inspect.signature(getattr(diffusers, pipeline).__call__).parameters
    stage1 = load_config(PrecomputeConfig, CONFIGS / name / "precompute.yaml", [], "precompute")
    assert stage1.texts[tower].max_tokens == called["max_sequence_length"].default


def test_no_code_knows_a_family_by_name() -> None:
    """Check identifiers and strings of the product's code, but not docstrings and comments."""
    found = []
    for name, path in modules().items():
        if name.split(".")[0] not in ("train", "cluster", "precompute", "shards", "plan"):
            continue
        if name == "train.export.single_file":  # names the layouts of other programs
            continue
        source = path.read_text()
        if not NAMES.search(source):
            continue
        tree = ast.parse(source)
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            texts = (
                [str(value) for value in vars(node).values() if isinstance(value, str)] if id(node) not in said else []
            )
            found += [f"{path.name}:{node.lineno}: {text}" for text in texts if NAMES.search(text)]  # type: ignore[attr-defined]
    assert not found


@pytest.mark.parametrize("name", FAMILIES)
def test_the_plan_is_of_what_is_encoded_and_trained(name: str) -> None:
    plan = load_config(Plan, CONFIGS / name / "plan.yaml", [], "plan")
    stage1 = load_config(PrecomputeConfig, CONFIGS / name / "precompute.yaml", [], "precompute")
    for number, phase in enumerate(plan.phases, 1):
        config = load_config(TrainConfig, CONFIGS / name / f"phase{number}.yaml", [], "train")
        assert (phase.bucket, phase.steps) == (config.data.streams[0].bucket, config.max_steps)
        sizes = (config.global_batch_size, config.microbatch_size)
        assert (phase.global_batch_size, phase.microbatch_size) == sizes
    assert list(plan.data.samples) == stage1.buckets
    assert plan.image.storage == stage1.image.storage
    assert plan.networks.texts.keys() == stage1.texts.keys()
    for tower, planned in plan.networks.texts.items():
        encoded = stage1.texts[tower]
        assert (planned.states, planned.pooled, planned.masked) == (encoded.states, encoded.pooled, encoded.masked)
        assert (planned.trim, planned.storage) == (encoded.trim, encoded.storage)
        assert planned.max_tokens == encoded.max_tokens or encoded.beyond_template
