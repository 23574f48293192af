"""Draw images with a diffusers pipeline, from noise keyed by sample."""

import hashlib
import inspect
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

from evaluation.sampling.model import check_code, code_files
from evaluation.sampling.noise import initial_noise, step_generator
from evaluation.sampling.sets import PlannedImage
from evaluation.sampling.settings import Drawing, SamplerName
from shards.base.device import Precision
from shards.base.errors import RequestError, WorkError
from shards.format.buckets import Bucket
from shards.format.models import DISABLED_OPTIONS, TRAINED_ARGUMENTS, TRAINED_GUIDANCE

SCHEDULERS: dict[SamplerName, str] = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "dpm_solver": "DPMSolverMultistepScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_ancestral": "EulerAncestralDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "unipc": "UniPCMultistepScheduler",
}
"""Sampler → name of its diffusers class."""
FLOW = "flow_prediction"
PACKED = 4
"""Number of latent pixels (2 × 2) that some pipelines pack into one token."""
ZEROS = "force_zeros_for_empty_prompt"


def load_pipeline(folder: Path, device: str, precision: Precision, trust_remote_code: bool = False) -> Any:
    """Load a pipeline onto `device`, without its safety checker, which would replace flagged images with black ones.

    Raises:
        RequestError: the folder contains untrusted code.
    """
    check_code(folder, trust_remote_code)
    index = diffusers.DiffusionPipeline.load_config(folder)
    options: dict[str, Any] = {"safety_checker": None} if "safety_checker" in index else {}
    if code_files(folder):  # written by `train export`, or trusted
        options["trust_remote_code"] = True
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, use_safetensors=True, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device, getattr(torch, precision))


def load_scheduler(folder: Path) -> Any:
    """Load the scheduler from a pipeline's folder."""
    _, name = diffusers.DiffusionPipeline.load_config(folder)["scheduler"]
    return getattr(diffusers, name).from_pretrained(folder, subfolder="scheduler")


def sampler_of(scheduler: Any, name: SamplerName) -> Any:
    """Return the pipeline's own scheduler for `own`; otherwise build the named scheduler with the same noise schedule.

    Raises:
        RequestError: the named sampler does not support the noise schedule or the prediction type of the pipeline's own
            scheduler.
    """
    if name == "own":
        return scheduler
    own_name, remedy = type(scheduler).__name__, "Set sampling.sampler to `own`, the pipeline's own scheduler."
    if scheduler.config.get("prediction_type", FLOW) == FLOW:
        raise RequestError(
            f"The model was trained with flow matching, which the sampler {name} does not support. {remedy}"
        )
    # otherwise DDIM and DDPM would clip predictions to [-1, 1], which is the range of pixels, but not of latents
    clips = scheduler.config.get("clip_sample", False)
    build = partial(getattr(diffusers, SCHEDULERS[name]).from_config, scheduler.config, clip_sample=clips)
    try:
        sampler = build()
        _try_step(build())
    except (NotImplementedError, TypeError, ValueError) as error:
        raise RequestError(
            f"The sampler {name} cannot draw images with the settings of the pipeline's {own_name}: {error}. {remedy}"
        ) from error
    own_noise, noise = getattr(scheduler, "alphas_cumprod", None), sampler.alphas_cumprod
    # some schedulers replace the last step's 0 by a small number
    if own_noise is None or own_noise.shape != noise.shape or not torch.allclose(own_noise, noise, 1e-6, 1e-7):
        raise RequestError(
            f"The sampler {name} cannot use the noise schedule of the pipeline's {own_name}, so its images would be "
            f"wrong. {remedy}"
        )
    return sampler


def _try_step(sampler: Any) -> None:
    """Take one sampling step. This changes the sampler's state, but not the global random state."""
    sampler.set_timesteps(2)
    zeros, timestep = torch.zeros(1, 4, 8, 8), sampler.timesteps[0]
    with torch.random.fork_rng(devices=[]):
        sampler.step(zeros, timestep, sampler.scale_model_input(zeros, timestep))


def describe_scheduler(scheduler: Any) -> str:
    """Return a scheduler's class and a hash of its config."""
    settings = {key: value for key, value in scheduler.config.items() if not key.startswith("_")}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return f"{type(scheduler).__name__} {digest}"


@torch.inference_mode()
def draw(pipeline: Any, samples: Sequence[PlannedImage], drawing: Drawing) -> Tensor:
    """Draw images: (N, 3, height, width) float32 in [0, 1], not yet rounded.

    Raises:
        WorkError: an image has non-finite pixels.
    """
    bucket, setting = Bucket.parse(drawing.size), drawing.setting
    keys = [(drawing.seed, sample.prompt.id, sample.index) for sample in samples]
    network = getattr(pipeline, "unet", None) or pipeline.transformer
    is_packed = hasattr(pipeline, "_pack_latents")
    channels = network.config.in_channels // (PACKED if is_packed else 1)
    shape = (channels, *bucket.latent_hw(pipeline.vae_scale_factor))
    latents = torch.stack([initial_noise(*key, shape) for key in keys]).to(network.dtype)
    if is_packed:
        latents = pipeline._pack_latents(latents, len(keys), *shape)
    accepted = inspect.signature(pipeline.__call__).parameters
    options: dict[str, Any] = {name: False for name in DISABLED_OPTIONS if name in accepted}
    options |= network.config.get(TRAINED_ARGUMENTS, {})
    pictures: Tensor = pipeline(
        [sample.prompt.text for sample in samples],
        height=bucket.height,
        width=bucket.width,
        num_inference_steps=setting.steps,
        latents=latents,
        generator=[step_generator(*key) for key in keys],
        output_type="pt",
        **guidance_arguments(pipeline, drawing, len(samples)),
        **options,
    ).images.float()
    if not torch.isfinite(pictures).all():
        raise WorkError(
            f"The model drew images with non-finite pixels in the batch that starts with the prompt "
            f"{samples[0].prompt.text!r}. Try --sampling.precision float32. If the pixels are still non-finite, the "
            f"checkpoint's weights are unusable, so sample an earlier checkpoint."
        )
    return pictures


def guidance_arguments(pipeline: Any, drawing: Drawing, count: int) -> dict[str, Any]:
    """Build the pipeline's guidance arguments for a batch of `count` prompts, as `drawing` specifies.

    Without a negative prompt, the unconditional input is the one that training used for dropped captions. A pipeline
    that replaces a missing negative prompt with zeros gets no negative prompt. All other pipelines get the empty
    caption, because some of them skip guidance if there is no negative prompt.
    """
    text = drawing.negative_prompt
    zeros = text is None and pipeline.config.get(ZEROS, False)
    arguments: dict[str, Any] = {"negative_prompt": None if zeros else [text or ""] * count}
    if "true_cfg_scale" not in inspect.signature(pipeline.__call__).parameters:
        return arguments | {"guidance_scale": drawing.setting.guidance}
    arguments["true_cfg_scale"] = drawing.setting.guidance
    scale = drawing.guidance_input
    if scale is None:
        scale = pipeline.transformer.config.get(TRAINED_GUIDANCE)
    # in these pipelines, `guidance_scale` is an input of the network; if it is omitted, the pipeline's default applies
    return arguments | ({} if scale is None else {"guidance_scale": scale})


def has_guidance_input(folder: Path) -> bool:
    """Return whether a pipeline's network takes a guidance scale as an input."""
    config = folder / "transformer" / "config.json"
    return config.is_file() and bool(json.loads(config.read_text()).get("guidance_embeds", False))


def to_bytes(pictures: Tensor) -> Tensor:
    """Round pixels to the nearest of 256 levels: (N, 3, H, W) in [0, 1] → (N, H, W, 3) uint8 on the CPU."""
    return (pictures * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()
