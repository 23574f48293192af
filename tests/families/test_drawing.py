"""Evaluation calls each family's network with the conditioning used in training, with and without a prompt."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest

from evaluation.sampling.pipeline import has_guidance_input
from tests.families.small import TOKENS, Small, in_make_test, stir
from tests.families.starting import small_run, started
from tests.families.steps import check_steps, exported_case
from train.config import TrainConfig
from train.export.pipeline import ExportConfig, write_pipeline
from train.trainer import Trainer

TRAINED = 2.5
"""Value of the guidance input in training, unlike any pipeline's default."""


def begun(made: Small, run_dir: str, **network: Any) -> tuple[TrainConfig, Trainer]:
    """Make a run with one checkpoint of its initial weights; `network` overrides fields of the backbone JSON."""
    fields = small_run(made, run_dir, data={"shuffle": False, "num_canonical_nodes": 1})
    path = made.folder / f"{run_dir}.json"
    path.write_text(json.dumps(json.loads(Path(fields["backbone"]["config"]).read_text()) | network))
    fields["backbone"]["config"] = str(path)
    for item in fields["backbone"].get("inputs", {}).values():
        if item["kind"] == "guidance":
            item["scale"] = TRAINED
    config = TrainConfig.model_validate(fields)
    trainer = started(config)
    stir(trainer.train_step.network)
    trainer.save(is_last=True)
    return config, trainer


@pytest.mark.parametrize("name", in_make_test("sd2", "flux1"))
def test_the_networks_inputs_are_those_of_training(name: str, small: Callable[[str], Small]) -> None:
    """A network without and one with a guidance input. tests/families/test_projection.py compares every family."""
    made = small(name)
    config, trainer = begun(made, "drawn")
    folder = write_pipeline(config.work, ExportConfig(weights="raw"))
    check_steps(exported_case(made, config, trainer, folder))

    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    compile(code, "README.md", "exec")
    assert (f"guidance_scale={TRAINED:g}," in code) == has_guidance_input(folder)
    assert "height=64, width=64" in code
    assert ("true_cfg_scale=" in code) == has_guidance_input(folder)
    assert (f"max_sequence_length={TOKENS}," in code) == (name in ("flux1", "sd3", "pixart-sigma", "sana"))
    assert ("use_resolution_binning=False," in code) == (name in ("pixart-sigma", "sana", "prx"))
    assert ("clean_caption=False," in code) == (name in ("pixart-sigma", "sana"))


def test_an_exported_unet_draws_the_size_that_was_trained(small: Callable[[str], Small]) -> None:
    """Draw without height and width; the size in the U-Net's original config does not matter."""
    config, _ = begun(small("sd2"), "sized", sample_size=16)
    folder = write_pipeline(config.work, ExportConfig(weights="raw"))
    pipeline = getattr(diffusers, config.backbone.pipeline.class_name).from_pretrained(folder)
    assert pipeline("a", num_inference_steps=1, output_type="np").images.shape == (1, 64, 64, 3)
    assert "Without `height` and `width`, images have 64x64 pixels." in (folder / "README.md").read_text()
