"""Flow matching end to end: a small U-Net learns one set of latents, and the exported pipeline reproduces it."""

from pathlib import Path

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, StableDiffusionPipeline, UNet2DConditionModel

from tests.tiny import stable_diffusion
from tests.train.specs import make_batch, spec
from train.data.draws import Draws
from train.export.scheduler import sampler
from train.model.network import build_network
from train.objective.config import ObjectiveConfig
from train.objective.loss import DiffusionLoss

pytestmark = pytest.mark.heavy

OBJECTIVE = ObjectiveConfig(prediction="flow_matching", caption_dropout=0)
UNET = Path(__file__).parents[2] / "tiny_unet.json"
LATENTS = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(9)).half()
TEXT = torch.zeros(16, 16).half()
NUM_SAMPLES = 4


def trained() -> UNet2DConditionModel:
    """Train a U-Net on one image's latents 150 × 16 times."""
    unet = build_network(UNET, seed=0)
    loss = DiffusionLoss(OBJECTIVE, spec(posterior="mean", scaling_factor=1.0, uncond=TEXT), torch.device("cpu"))
    optimizer = torch.optim.AdamW(unet.parameters(), lr=6e-3)
    slots = torch.arange(16)
    data = make_batch(["one"] * 16, slots, LATENTS.expand(16, -1, -1, -1), TEXT.expand(16, -1, -1))
    for step in range(150):
        loss(unet, loss.add_noise(data, Draws(0, step, slots))).per_sample.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return unet.eval()


def error(samples: torch.Tensor) -> float:
    """Return the distance of the samples from the latents, relative to the distance of noise from them."""
    return float((samples - LATENTS.float()).norm() / (2 * LATENTS.float().expand_as(samples)).norm())


def test_the_exported_pipeline_gives_back_what_was_learned(models: Path, tmp_path: Path) -> None:
    stable_diffusion(models, trained(), sampler(OBJECTIVE)).save_pretrained(tmp_path)
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path, safety_checker=None)
    assert isinstance(pipeline.scheduler, DPMSolverMultistepScheduler)
    pipeline.set_progress_bar_config(disable=True)
    samples = pipeline(
        prompt_embeds=TEXT.float().expand(NUM_SAMPLES, -1, -1),
        height=64,
        width=64,
        num_inference_steps=20,
        guidance_scale=1.0,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
    ).images
    noise = torch.randn(NUM_SAMPLES, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert error(samples) < 0.2 < 0.6 < error(noise)
