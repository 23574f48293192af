"""Evaluation calls each family's network with the conditioning used in training, with and without a prompt."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from evaluation.sampling.job import describe_drawing
from evaluation.sampling.pipeline import PlannedImage, draw, has_guidance_input, load_pipeline
from evaluation.sampling.prompts import Prompt
from evaluation.sampling.settings import SamplingConfig
from tests.families.calls import OWN
from tests.families.small import FAMILIES, Small, stir
from tests.families.starting import small_run, started
from tests.families.steps import STEPS, Case, Recorder, captions_of, check_steps
from train.config import TrainConfig
from train.data.loader import Loader
from train.export.pipeline import ExportConfig, write_pipeline
from train.prepare import prepare
from train.trainer import Trainer

LIMITS = ("max_sequence_length", "tokenizer_max_length", "complex_human_instruction", "skip_text_cleaning")
"""Arguments that fit the small text towers; evaluation leaves them at the pipelines' defaults."""
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


@pytest.mark.parametrize("name", FAMILIES)
def test_the_networks_inputs_are_those_of_training(name: str, small: Callable[[str], Small]) -> None:
    made = small(name)
    config, trainer = begun(made, "drawn")
    folder = write_pipeline(config.work, ExportConfig(weights="raw"))
    pipeline = load_pipeline(folder, "cpu", "float32")
    encode, limits = pipeline.encode_prompt, {key: value for key, value in OWN[name].items() if key in LIMITS}
    pipeline.encode_prompt = lambda *args, **kwargs: encode(*args, **kwargs | limits)
    recorder, network = Recorder(), getattr(pipeline, "unet", None) or pipeline.transformer
    recorder.attach(pipeline.scheduler)
    recorder.watch(network)

    count = 1 if name == "prx" else 4
    batch = next(iter(Loader(config.data, prepare(config).spec, count, 0, 0, torch.arange(count))))
    batch.columns["size"][:] = torch.tensor([64, 64, 0, 0])  # pipelines pass on the size that they draw
    captions = captions_of(made)
    samples = [PlannedImage(i, Prompt(key, captions[key]), 0) for i, key in enumerate(batch.keys)]
    sampling = SamplingConfig(size="64x64", guidance=[2.0], steps=[STEPS])
    draw(pipeline, samples, describe_drawing(folder, [], sampling, sampling.grid[0]))

    check_steps(Case(name, config, network, trainer.train_step.loss, batch, recorder.steps))

    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    compile(code, "README.md", "exec")
    assert (f"guidance_scale={TRAINED:g}," in code) == has_guidance_input(folder)
    assert "height=64, width=64" in code
    assert ("true_cfg_scale=" in code) == has_guidance_input(folder)


@pytest.mark.parametrize("name", ["sd2", "sdxl"])
def test_an_exported_unet_draws_the_size_that_was_trained(name: str, small: Callable[[str], Small]) -> None:
    """Draw without height and width; the size in the U-Net's original config does not matter."""
    config, _ = begun(small(name), "sized", sample_size=16)
    folder = write_pipeline(config.work, ExportConfig(weights="raw"))
    pipeline = getattr(diffusers, config.backbone.pipeline.class_name).from_pretrained(folder)
    assert pipeline("a", num_inference_steps=1, output_type="np").images.shape == (1, 64, 64, 3)
    assert "Without `height` and `width`, images have 64x64 pixels." in (folder / "README.md").read_text()
