"""Flow matching end to end: the exact velocity has no loss, and the exported pipeline follows it to the latents."""

from pathlib import Path
from typing import Any

import torch
from diffusers import DPMSolverMultistepScheduler, StableDiffusionPipeline
from torch import Tensor

from tests.tiny import stable_diffusion
from tests.train.specs import Answer, make_batch, spec
from train.data.draws import Draws
from train.export.scheduler import sampler
from train.model.network import build_network
from train.objective.config import ObjectiveConfig
from train.objective.loss import DiffusionLoss

OBJECTIVE = ObjectiveConfig(prediction="flow_matching", caption_dropout=0)
UNET = Path(__file__).parents[2] / "tiny_unet.json"
LATENTS = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(9)).half()
TEXT = torch.zeros(16, 16).half()
NUM_SAMPLES = 4


def exact(noisy: Tensor, timestep: Tensor, *_: Any, **__: Any) -> Answer:
    """Return noise − latents, what a network learns if all images have the same latents: x = (1 − t)·latents +
    t·noise, so noise − latents = (x − latents) / t."""
    t = (timestep.double() / 1000).reshape(-1, 1, 1, 1)
    return Answer((((noisy.double() - LATENTS.double()) / t).to(noisy.dtype),))


def test_the_exported_pipeline_gives_back_what_the_loss_asks_for(models: Path, tmp_path: Path) -> None:
    slots = torch.arange(16)
    loss = DiffusionLoss(OBJECTIVE, spec(posterior="mean", scaling_factor=1.0, uncond=TEXT), torch.device("cpu"))
    data = make_batch(["one"] * 16, slots, LATENTS.expand(16, -1, -1, -1), TEXT.expand(16, -1, -1))
    assert loss(exact, loss.add_noise(data, Draws(0, 0, slots))).per_sample.max() < 1e-6  # type: ignore[arg-type]

    stable_diffusion(models, build_network(UNET, seed=0), sampler(OBJECTIVE)).save_pretrained(tmp_path)
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path, safety_checker=None)
    assert isinstance(pipeline.scheduler, DPMSolverMultistepScheduler)
    pipeline.unet.forward = exact
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
    torch.testing.assert_close(samples, LATENTS.float().expand_as(samples), rtol=0, atol=0.01)
