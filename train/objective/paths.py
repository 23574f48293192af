"""Paths from data to noise, on tensors alone: how a sample is noised, what is to be predicted, how it is weighed."""

import math
from abc import ABC, abstractmethod

import torch
from diffusers import DDPMScheduler
from torch import Tensor

from train.data.draws import Draws, Purpose
from train.objective.config import ObjectiveConfig
from train.objective.times import cosmap, mode, shifted


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
