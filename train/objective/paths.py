"""Paths from data to noise, on tensors alone: how a sample is noised, what is to be predicted, how it is weighed."""

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from diffusers import DDPMScheduler
from pydantic import Field, model_validator
from torch import Tensor

from shards.base.config import Config
from train.data.draws import Draws, Purpose
from train.objective.times import ShiftConfig, cosmap, mode, shifted

FLOW_ONLY = ("timestep_sampling", "weighting", "shift")


class ObjectiveConfig(Config):
    """What the U-Net learns to predict, under which noise."""

    prediction: Literal["epsilon", "v_prediction", "sample", "flow_matching"] = "epsilon"
    """The first three are DDPM's, over the β below; flow_matching is rectified flow, which has no β."""
    num_train_timesteps: int = Field(1000, ge=1)
    """With flow_matching, the scale on which the U-Net is told the time in [0, 1]."""
    timestep_sampling: Literal["uniform", "logit_normal", "mode", "cosmap"] = "uniform"
    """How flow_matching draws its time; the sigmoid of a normal dwells in the middle (Esser et al., 2024)."""
    logit_mean: float = 0.0
    """Of the normal of logit_normal."""
    logit_std: float = Field(1.0, gt=0)
    """Of the same."""
    mode_scale: float = Field(1.29, ge=-1, le=2 / (math.pi - 2))
    """Of mode; 0 is uniform, and within these bounds no two draws give one time."""
    shift: ShiftConfig = ShiftConfig()
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    """With flow_matching, each sample's weight in the loss: max(t, 1/num_train_timesteps)^−2, or
    2 / (π·(1 − 2t + 2t²)), the density of cosmap. Without the limit t^−2 has an infinite mean over uniform times; at
    1/1000 diffusers' training scripts have their smallest time."""
    beta_schedule: Literal["scaled_linear", "linear", "squaredcos_cap_v2"] = "scaled_linear"
    """How β goes from `beta_start` to `beta_end`, as diffusers names it."""
    beta_start: float = Field(0.00085, gt=0, lt=1)
    """Variance of the first noise step."""
    beta_end: float = Field(0.012, gt=0, lt=1)
    """Variance of the last."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of samples that see the empty caption, for classifier-free guidance."""
    min_snr_gamma: float | None = Field(None, gt=0)
    """Weigh each sample's loss by min(SNR, γ) in terms of the latents (Hang et al., 2023); null: all alike. With
    zero_terminal_snr the weight is min(SNR + 1, γ), because min(SNR, γ) is 0 at the last timestep, which would then
    never be trained."""
    offset_noise: float = Field(0.0, ge=0)
    """Size of a further draw per channel, the same over the picture, added to the noise."""
    zero_terminal_snr: bool = False
    """Rescale the schedule so that its last step is pure noise (Lin et al., 2023); not with epsilon."""

    @model_validator(mode="after")
    def _check(self) -> "ObjectiveConfig":
        if self.prediction == "flow_matching":
            for name in ("zero_terminal_snr", "min_snr_gamma", "offset_noise"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} with prediction flow_matching: that path ends in pure noise by itself and has no SNR "
                        f"weights; leave it out"
                    )
            return self
        for name in FLOW_ONLY:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                shown = f"{name}.kind {value.kind}" if isinstance(value, ShiftConfig) else f"{name} {value}"
                raise ValueError(f"{shown} goes with prediction flow_matching alone")
        if self.zero_terminal_snr and self.prediction == "epsilon":
            raise ValueError(
                "zero_terminal_snr with prediction epsilon has nothing to learn at the last step; use v_prediction"
            )
        return self


class NoisePath(ABC):
    """What the loss asks of a path. Latents and noise are (N, C, h, w) float32, timesteps (N,)."""

    num_train_timesteps: int

    @abstractmethod
    def timesteps(self, draws: Draws) -> Tensor:
        """(N,) times at which the samples are noised, in the unit in which the U-Net is told of them."""

    def shifted(self, timesteps: Tensor, latent_hw: tuple[int, int]) -> Tensor:
        """The drawn times (N,), moved as the size of the latents (h, w) asks for."""
        return timesteps

    def fixed_timesteps(self, count: int, place: float = 0.5) -> list[int] | list[float]:
        """One of each of `count` equal parts of the time axis: its middle, or its start at a `place` of 0."""
        return [(k + place) * self.num_train_timesteps / count for k in range(count)]

    @abstractmethod
    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """The latents at `timesteps`, x_t."""

    @abstractmethod
    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """What the U-Net should predict there."""

    def weight(self, timesteps: Tensor) -> Tensor | None:
        """Each sample's weight in the loss, (N,); None: 1."""
        return None


def noise_path(config: ObjectiveConfig, device: torch.device) -> NoisePath:
    """The path that the config names."""
    return RectifiedFlow(config) if config.prediction == "flow_matching" else DDPM(config, device)


def noise_scheduler(config: ObjectiveConfig) -> DDPMScheduler:
    """DDPM's forward process, as diffusers defines it; the export's sampler is made from it, too."""
    return DDPMScheduler(
        num_train_timesteps=config.num_train_timesteps,
        beta_schedule=config.beta_schedule,
        beta_start=config.beta_start,
        beta_end=config.beta_end,
        prediction_type=config.prediction,
        rescale_betas_zero_snr=config.zero_terminal_snr,
        clip_sample=False,
    )


class DDPM(NoisePath):
    """The variance-preserving path of Ho et al. (2020): x_t = √ᾱ_t·x_0 + √(1 − ᾱ_t)·noise, at whole timesteps."""

    def __init__(self, config: ObjectiveConfig, device: torch.device):
        self.num_train_timesteps = config.num_train_timesteps
        self.prediction, self.min_snr_gamma = config.prediction, config.min_snr_gamma
        self.zero_terminal_snr = config.zero_terminal_snr
        self.scheduler = noise_scheduler(config)
        # moved once: add_noise would copy it to the device at each step
        self.scheduler.alphas_cumprod = self.scheduler.alphas_cumprod.to(device)

    def timesteps(self, draws: Draws) -> Tensor:
        """(N,) int64, uniform in [0, num_train_timesteps)."""
        return draws.integers(Purpose.TIMESTEP, self.num_train_timesteps)

    def fixed_timesteps(self, count: int, place: float = 0.5) -> list[int]:
        """The same, rounded down."""
        return [int(time) for time in super().fixed_timesteps(count, place)]

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x_t = √ᾱ_t·x_0 + √(1 − ᾱ_t)·noise."""
        return self.scheduler.add_noise(latents, noise, timesteps)

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """The noise; the velocity √ᾱ·noise − √(1 − ᾱ)·x_0 of Salimans and Ho (2022); or the latents."""
        if self.prediction == "epsilon":
            return noise
        if self.prediction == "v_prediction":
            return self.scheduler.get_velocity(latents, noise, timesteps)
        return latents

    def weight(self, timesteps: Tensor) -> Tensor | None:
        """None, or min(SNR, γ) of Hang et al. (2023) in terms of the latents, put in terms of what is predicted.

        An error in the noise, or the velocity, is one in the latents times SNR, or SNR + 1.

        With a zero terminal SNR it is min(SNR + 1, γ): SNR + 1 is the weight in terms of the latents that an unweighted
        velocity loss has (Salimans and Ho, 2022), and it does not vanish at the last timestep.
        """
        if self.min_snr_gamma is None:
            return None
        alpha = self.scheduler.alphas_cumprod[timesteps]
        snr = alpha / (1.0 - alpha)
        of_latents = (snr + 1.0 if self.zero_terminal_snr else snr).clamp(max=self.min_snr_gamma)
        return of_latents / {"epsilon": snr, "v_prediction": snr + 1.0, "sample": 1.0}[self.prediction]


class RectifiedFlow(NoisePath):
    """The straight line of Liu et al. (2022): x_t = (1 − t)·x_0 + t·noise, t in (0, 1]; the U-Net is told t·T."""

    def __init__(self, config: ObjectiveConfig):
        self.num_train_timesteps = config.num_train_timesteps
        self.config = config

    def timesteps(self, draws: Draws) -> Tensor:
        """(N,) float32 in (0, num_train_timesteps]; uniform, the sigmoid of a normal, or a map of uniforms."""
        config = self.config
        if config.timestep_sampling == "logit_normal":
            normals = draws.normal(Purpose.TIMESTEP, ())
            return torch.sigmoid(config.logit_mean + config.logit_std * normals) * self.num_train_timesteps
        times = draws.uniform(Purpose.TIMESTEP)
        if config.timestep_sampling == "mode":
            times = mode(times, config.mode_scale)
        elif config.timestep_sampling == "cosmap":
            times = cosmap(times)
        return times * self.num_train_timesteps

    def shifted(self, timesteps: Tensor, latent_hw: tuple[int, int]) -> Tensor:
        """The drawn times (N,), moved towards noise."""
        alpha = self.config.shift.alpha(latent_hw)
        if alpha == 1.0:  # bit by bit as they were
            return timesteps
        return shifted(timesteps / self.num_train_timesteps, alpha) * self.num_train_timesteps

    def weight(self, timesteps: Tensor) -> Tensor | None:
        """None, or one of diffusers' `compute_loss_weighting_for_sd3`, at the times that were trained on.

        t^−2 stops at 1/T. diffusers' training scripts draw from the T sigmas of a scheduler, of which 1/T is the
        smallest before any shift; over continuous times near 0 the expected weight would be infinite.
        """
        if self.config.weighting == "none":
            return None
        t = timesteps / self.num_train_timesteps
        if self.config.weighting == "sigma_sqrt":
            return t.clamp(min=1.0 / self.num_train_timesteps) ** -2.0
        return 2.0 / (math.pi * (1.0 - 2.0 * t + 2.0 * t**2))

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x_t = (1 − t)·x_0 + t·noise."""
        t = (timesteps / self.num_train_timesteps)[:, None, None, None]
        return (1.0 - t) * latents + t * noise

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """dx_t/dt = noise − x_0."""
        return noise - latents
