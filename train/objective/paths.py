"""Paths from data to noise: how noise is added, what the network must predict, and how samples are weighted."""

import math
from abc import ABC, abstractmethod

import torch
from diffusers import DDPMScheduler
from torch import Tensor

from train.data.draws import Draws, Purpose
from train.objective.config import ObjectiveConfig

# `mode`, `cosmap` and `shifted` compute times t in (0, 1] for flow matching, where 1 is pure noise. Their formulas are
# from Esser et al., "Scaling rectified flow transformers for high-resolution image synthesis" (2024).
SMALLEST = 2.0**-33
"""The smallest uniform draw, which is the lower bound of all times."""


def mode(u: Tensor, scale: float) -> Tensor:
    """Map uniforms (N,) to times that favor the middle or, with a negative scale, both ends (section 3.1)."""
    return (1.0 - u - scale * (torch.cos(math.pi / 2 * u) ** 2 - 1.0 + u)).clamp(SMALLEST, 1.0)


def cosmap(u: Tensor) -> Tensor:
    """Map uniforms u (N,) to the times t whose log-SNR is that of the cosine schedule at u (section 3.1).

    The formula is t = 1 − 1/(tan(πu/2) + 1), rewritten without the pole of the tangent.
    """
    sine, cosine = torch.sin(math.pi / 2 * u), torch.cos(math.pi / 2 * u)
    return (sine / (sine + cosine)).clamp(SMALLEST, 1.0)


def shifted(t: Tensor, alpha: float) -> Tensor:
    """Return αt / (1 + (α − 1)·t) (equation 23), rewritten so that t = 1 gives exactly 1."""
    return t / (t + (1.0 - t) / alpha)


class NoisePath(ABC):
    """A path from data to noise. Latents and noise are (N, C, h, w) float32, timesteps (N,)."""

    num_train_timesteps: int

    @abstractmethod
    def timesteps(self, draws: Draws) -> Tensor:
        """Draw timesteps (N,), in the unit in which the network receives them."""

    def shifted(self, timesteps: Tensor, latent_hw: tuple[int, int]) -> Tensor:
        """Return the drawn timesteps (N,), shifted as configured for latents of size (h, w)."""
        return timesteps

    def fixed_timesteps(self, count: int, place: float = 0.5) -> list[int] | list[float]:
        """Return one timestep from each of `count` equal parts of the time axis.

        Args:
            place: position of the timestep within its part: 0.5 is the middle, and 0 is the start.
        """
        return [(k + place) * self.num_train_timesteps / count for k in range(count)]

    @abstractmethod
    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the noisy latents x_t at `timesteps`."""

    @abstractmethod
    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the target that the network must predict at `timesteps`."""

    def weight(self, timesteps: Tensor) -> Tensor | None:
        """Return the samples' weights in the loss, (N,); None: all weights are 1."""
        return None


def noise_path(config: ObjectiveConfig, device: torch.device) -> NoisePath:
    """Build the configured path."""
    return RectifiedFlow(config) if config.prediction == "flow_matching" else DDPM(config, device)


def noise_scheduler(config: ObjectiveConfig) -> DDPMScheduler:
    """Build the diffusers scheduler of DDPM's forward process. An export's sampler is built from it as well."""
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
    """The variance-preserving path of Ho et al. (2020), x_t = √ᾱ_t·x_0 + √(1 − ᾱ_t)·noise, at integer timesteps."""

    def __init__(self, config: ObjectiveConfig, device: torch.device):
        self.num_train_timesteps = config.num_train_timesteps
        self.prediction, self.min_snr_gamma = config.prediction, config.min_snr_gamma
        self.zero_terminal_snr = config.zero_terminal_snr
        self.scheduler = noise_scheduler(config)
        # moved to the device here, because add_noise would otherwise copy it there in every step
        self.scheduler.alphas_cumprod = self.scheduler.alphas_cumprod.to(device)

    def timesteps(self, draws: Draws) -> Tensor:
        """Draw int64 timesteps (N,), uniform in [0, num_train_timesteps)."""
        return draws.integers(Purpose.TIMESTEP, self.num_train_timesteps)

    def fixed_timesteps(self, count: int, place: float = 0.5) -> list[int]:
        """Return one integer timestep, rounded down, from each of `count` equal parts of the time axis."""
        return [int(time) for time in super().fixed_timesteps(count, place)]

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return x_t = √ᾱ_t·x_0 + √(1 − ᾱ_t)·noise."""
        return self.scheduler.add_noise(latents, noise, timesteps)

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the noise, the velocity √ᾱ·noise − √(1 − ᾱ)·x_0 of Salimans and Ho (2022), or the latents."""
        if self.prediction == "epsilon":
            return noise
        if self.prediction == "v_prediction":
            return self.scheduler.get_velocity(latents, noise, timesteps)
        return latents

    def weight(self, timesteps: Tensor) -> Tensor | None:
        """Return the min-SNR weights of Hang et al. (2023), or None if they are disabled.

        The weight of a squared error in the latents is min(SNR, γ). The squared error in the noise equals the squared
        error in the latents times SNR, and the squared error in the velocity equals it times SNR + 1. So for these
        predictions, the weight is divided by SNR or SNR + 1.

        With a zero terminal SNR, the weight of a squared error in the latents is min(SNR + 1, γ) instead. SNR + 1 is
        the weight that an unweighted velocity loss implies (Salimans and Ho, 2022), and is not 0 at the last timestep.
        """
        if self.min_snr_gamma is None:
            return None
        alpha = self.scheduler.alphas_cumprod[timesteps]
        snr = alpha / (1.0 - alpha)
        if self.prediction == "epsilon":
            return (self.min_snr_gamma / snr).clamp(max=1.0)  # 1 even if SNR is so small that it is rounded to 0
        latent_weight = (snr + 1.0 if self.zero_terminal_snr else snr).clamp(max=self.min_snr_gamma)
        return latent_weight / {"v_prediction": snr + 1.0, "sample": 1.0}[self.prediction]


class RectifiedFlow(NoisePath):
    """The straight path of Liu et al. (2022), x_t = (1 − t)·x_0 + t·noise for t in (0, 1].

    Timesteps are t·T, where T is num_train_timesteps.
    """

    def __init__(self, config: ObjectiveConfig):
        self.num_train_timesteps = config.num_train_timesteps
        self.config = config

    def timesteps(self, draws: Draws) -> Tensor:
        """Draw float32 timesteps (N,) in (0, num_train_timesteps] from the configured distribution."""
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
        """Return the drawn timesteps (N,), shifted toward noise."""
        alpha = self.config.shift.alpha(latent_hw)
        if alpha == 1.0:  # keeps the timesteps bit-exact
            return timesteps
        return shifted(timesteps / self.num_train_timesteps, alpha) * self.num_train_timesteps

    def weight(self, timesteps: Tensor) -> Tensor | None:
        """Return the weights of diffusers' `compute_loss_weighting_for_sd3`, or None if they are disabled.

        Unlike there, t is at least 1/T in t^−2, because with continuous times, the expected weight would be infinite.
        diffusers' training scripts draw from the T sigmas of a scheduler, the smallest of which is 1/T before any
        shift.
        """
        if self.config.weighting == "none":
            return None
        t = timesteps / self.num_train_timesteps
        if self.config.weighting == "sigma_sqrt":
            return t.clamp(min=1.0 / self.num_train_timesteps) ** -2.0
        return 2.0 / (math.pi * (1.0 - 2.0 * t + 2.0 * t**2))

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return x_t = (1 − t)·x_0 + t·noise."""
        t = (timesteps / self.num_train_timesteps)[:, None, None, None]
        return (1.0 - t) * latents + t * noise

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the velocity dx_t/dt = noise − x_0."""
        return noise - latents
