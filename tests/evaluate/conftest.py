"""A pipeline of small random models, as an export has it."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTokenizer

from tests.runs import UNET


@pytest.fixture(scope="session")
def pipeline(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a StableDiffusionPipeline for 64 px. Not to be written to."""
    torch.manual_seed(1)
    unet = UNet2DConditionModel.from_config(json.loads(UNET.read_text()))
    folder = tmp_path_factory.mktemp("pipeline")
    StableDiffusionPipeline(
        vae=AutoencoderKL.from_pretrained(models / "vae"),
        text_encoder=CLIPTextModel.from_pretrained(models / "text_encoder"),
        tokenizer=CLIPTokenizer.from_pretrained(models / "tokenizer"),
        unet=unet,
        scheduler=DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder
