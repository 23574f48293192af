"""The scheduler of an exported pipeline: built from the objective, and checked against the pipeline's sampling loop."""

import inspect
from typing import Any

import diffusers
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler

from shards.base.errors import RequestError
from train.export.components import call_source
from train.model.backbone import PipelineConfig
from train.objective.config import ObjectiveConfig
from train.objective.paths import noise_scheduler


def sampler(
    objective: ObjectiveConfig, latent_hw: tuple[int, int] = (64, 64)
) -> DDIMScheduler | DPMSolverMultistepScheduler:
    """Build a deterministic sampler for the objective's noise schedule, configured like Stable Diffusion's.

    Its timesteps are shifted as in training. A shift that depends on the image size is computed for latents of size
    `latent_hw`.

    For flow matching, the sampler is DPM-Solver++ along the straight path, whose first-order version is Euler's method.
    Unlike diffusers' FlowMatchEulerDiscreteScheduler, it works with the stock StableDiffusionPipeline.
    """
    if objective.prediction == "flow_matching":
        return DPMSolverMultistepScheduler(
            num_train_timesteps=objective.num_train_timesteps,
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=objective.shift.alpha(latent_hw),
            steps_offset=1,  # unused here; diffusers warns about any other value
        )
    config = noise_scheduler(objective).config
    # a schedule that ends in pure noise must be sampled from its very last step (Lin et al., 2023)
    spacing = {"timestep_spacing": "trailing"} if objective.zero_terminal_snr else {"steps_offset": 1}
    return DDIMScheduler.from_config(config, clip_sample=False, set_alpha_to_one=False, **spacing)


def scheduler_of(pipeline: PipelineConfig, objective: ObjectiveConfig, latent_hw: tuple[int, int] = (64, 64)) -> Any:
    """Build the scheduler named in the config, with the noise schedule, prediction type and shift of training.

    The shift is computed for latents of size `latent_hw`, unless the pipeline computes it for each image. The config's
    settings override those of training, if the scheduler can then still sample from the network. If no scheduler is
    named, it is FlowMatchEulerDiscreteScheduler for flow matching in pipelines that compute the shift, and otherwise
    `sampler`.

    Raises:
        RequestError: diffusers has no scheduler with that name, it does not accept these settings, or it cannot sample
            from a network trained with this objective.
    """
    default, is_flow = sampler(objective, latent_hw), objective.prediction == "flow_matching"
    computes_shift = "calculate_shift(" in call_source(pipeline)
    fits = "FlowMatchEulerDiscreteScheduler" if is_flow and computes_shift else type(default).__name__
    name = pipeline.scheduler or fits
    try:
        scheduler_class = getattr(diffusers, name)
        accepted = inspect.signature(scheduler_class).parameters
        if "shift" in accepted:
            settings = objective.shift.scheduler_settings(
                latent_hw, computes_shift and "use_dynamic_shifting" in accepted
            )
            settings["num_train_timesteps"] = objective.num_train_timesteps
            rest: dict[str, Any] = {}
        else:
            settings, _, rest = scheduler_class.extract_init_dict(default.config)
        scheduler = scheduler_class(**settings | pipeline.scheduler_settings)
    except (AttributeError, ImportError, NotImplementedError, TypeError, ValueError) as error:
        raise RequestError(
            f"The scheduler {name} (backbone.pipeline.scheduler) cannot be built with the settings "
            f"{pipeline.scheduler_settings}: {error}. Name a diffusers scheduler and settings that it accepts."
        ) from error
    if not _supports(scheduler, objective):
        snr = " and zero_terminal_snr" if objective.zero_terminal_snr else ""
        remedy = f"Name a different scheduler, such as {fits}."
        if name == fits:
            remedy = "Remove those of the settings that contradict the objective."
        raise RequestError(
            f"The scheduler {name} with the settings {pipeline.scheduler_settings} (backbone.pipeline) does not "
            f"support networks that were trained with prediction {objective.prediction}{snr} and this noise schedule, "
            f"so the exported pipeline would sample wrongly. {remedy}"
        )
    # like from_config: keep settings that only other schedulers use, so that they can be built from this config
    scheduler.register_to_config(**rest)
    return scheduler


def _supports(scheduler: Any, objective: ObjectiveConfig) -> bool:
    """Return whether a scheduler can sample from a network that was trained with the objective."""
    config = scheduler.config
    if objective.prediction == "flow_matching":
        is_flow = config.get("use_flow_sigmas", "shift" in config)
        return bool(is_flow) and config.get("prediction_type", "flow_prediction") == "flow_prediction"
    if config.get("prediction_type") != objective.prediction or config.get("use_flow_sigmas"):
        return False
    noise, trained = getattr(scheduler, "alphas_cumprod", None), noise_scheduler(objective).alphas_cumprod
    # some schedulers replace the last step's 0 by a small number
    return noise is not None and noise.shape == trained.shape and torch.allclose(noise, trained, rtol=1e-6, atol=1e-7)


def check_steps(pipeline: PipelineConfig, scheduler: Any) -> None:
    """Check that the pipeline can use this scheduler, by making the same calls. This can change the scheduler's config.

    Raises:
        RequestError: the pipeline cannot use this scheduler.
    """
    source = call_source(pipeline)
    is_optional = "use_dynamic_shifting" in source  # such a pipeline passes a shift only to schedulers that need it
    is_scaled = False
    passes_mu = "calculate_shift(" in source and (scheduler.config.get("use_dynamic_shifting") or not is_optional)
    is_named = pipeline.scheduler is not None or pipeline.scheduler_settings
    remedy = (
        "Remove scheduler and scheduler_settings to use a scheduler that fits, or name a different one."
        if is_named
        else "Choose a different objective.prediction, or name a different scheduler."
    )
    prefix = f"{pipeline.class_name} cannot sample with the scheduler {type(scheduler).__name__} and the settings "
    prefix += f"{pipeline.scheduler_settings} (backbone.pipeline): "
    try:
        # fewer steps than in training, because `steps_offset` would shift the first of as many steps out of range
        num_steps = min(20, scheduler.config.num_train_timesteps - 1)
        scheduler.set_timesteps(num_steps, **{"mu": 1.0} if passes_mu else {})
        if "scale_model_input(" in source or hasattr(scheduler, "scale_model_input"):
            scaled = scheduler.scale_model_input(torch.ones(1), scheduler.timesteps[0])
            is_scaled = not torch.equal(scaled, torch.ones(1))
        scheduler.step(torch.zeros(1, 4, 8, 8), scheduler.timesteps[0], torch.zeros(1, 4, 8, 8))
    except (AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as error:
        raise RequestError(
            f"{prefix}called as in the pipeline, {'with' if passes_mu else 'without'} a shift `mu`, it raises "
            f"{error!r}. {remedy}"
        ) from error
    if is_scaled and "scale_model_input(" not in source:
        raise RequestError(f"{prefix}it scales the network's input, which the pipeline does not do. {remedy}")
