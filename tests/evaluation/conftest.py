"""Fixtures: a pipeline of small random models, a training run, and arguments that evaluate it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, UNet2DConditionModel

from tests.fixtures import as_in_a_fresh_process
from tests.once import made_once
from tests.runs import UNET, train_run
from tests.tiny import make_samples, make_tar, stable_diffusion


@pytest.fixture(scope="session")
def pipeline(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a StableDiffusionPipeline for 64 px. Tests must not modify it."""

    def make(folder: Path) -> None:
        torch.manual_seed(1)
        unet = UNet2DConditionModel.from_config(json.loads(UNET.read_text()))
        scheduler = DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1)
        stable_diffusion(models, unet, scheduler).save_pretrained(folder)

    return made_once(tmp_path_factory, "pipeline", make)


@pytest.fixture(scope="session")
def trained(latents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with checkpoints of steps 2, 4 and 6, which logs to TensorBoard. Tests must not modify it."""

    def make(folder: Path) -> None:
        changes = {"checkpoint": {"keep": 3}, "log": {"tracker": "tensorboard"}, "optimizer": {"lr": 0.01}}
        train_run(latents, folder / "run", UNET, **changes)
        as_in_a_fresh_process()

    return made_once(tmp_path_factory, "trained", make) / "run"


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run that tests may modify."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of `evaluation watch`: 60 images of 32 px in two parts, and the toy extractor's metrics."""
    folder = tmp_path_factory.mktemp("words")
    make_tar(folder / "tars", "00000", make_samples(0, 60, [(80, 64)]))
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"picture {i}\n" for i in range(60)))
    found = ["--prompts.file", str(prompts), "--sampling.size", "32x32"]
    found += ["--sampling.steps", "1", "--sampling.batch_size", "30", "--sampling.part_size", "30"]
    found += ["--workers.num_gpus", "0", "--workers.num_cpus", "1", "--extractors.toy", "true"]
    found += ["--reference.place", str(folder / "reference"), "--reference.pictures", str(folder / "tars")]
    return [*found, "--reference.size", "32x32", "--poll_seconds", "0.1"]
