"""The diffusion or flow-matching loss: from stored moments and text latents to one number per sample."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler
from torch import Tensor, nn

from shards.format.text import dequantise
from train.config import ObjectiveConfig
from train.data.batch import Batch
from train.data.draws import Draws, Purpose
from train.data.loader import DataSpec

LOG_VARIANCE_RANGE = (-30.0, 20.0)  # diffusers' DiagonalGaussianDistribution
NUM_QUARTERS = 4


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


@dataclass(frozen=True)
class Conditioning:
    """What the U-Net sees of the captions."""

    states: Tensor
    """(N, tokens, width) float32."""
    mask: Tensor | None
    """(N, tokens), 1 where a token is real; None where all are to be seen, padding included, as in SD."""


class DiffusionLoss:
    """Draws latents, noise, timesteps and dropped captions for each sample, and scores the U-Net's prediction."""

    def __init__(self, config: ObjectiveConfig, spec: DataSpec, device: torch.device):
        self.config = config
        self.spec = spec
        self.flow = config.prediction == "flow_matching"
        if not self.flow:
            self.scheduler = noise_scheduler(config)
            # moved once: add_noise would copy it to the device at each step
            self.scheduler.alphas_cumprod = self.scheduler.alphas_cumprod.to(device)
        self.uncond = spec.uncond.to(device)

    def __call__(self, unet: nn.Module, batch: Batch, draws: Draws) -> Tensor:
        """(N,) float32: each sample's mean squared error over its latents, weighted as configured."""
        size = math.prod(batch.image_latents.shape[2:]) * self.spec.latent_channels
        # a normal, which a timestep may be made of, takes two words
        counts = {Purpose.TIMESTEP: 2, Purpose.CAPTION_DROPOUT: 1, Purpose.NOISE: size}
        draws.draw(counts | ({Purpose.POSTERIOR: size} if self.spec.posterior == "moments" else {}))
        timesteps = self.timesteps(draws)
        dropped = draws.chance(Purpose.CAPTION_DROPOUT, self.config.caption_dropout)
        return self.weights(timesteps) * self.squared_error(unet, batch, timesteps, dropped, draws)

    def squared_error(self, unet: nn.Module, batch: Batch, timesteps: Tensor, dropped: Tensor, draws: Draws) -> Tensor:
        """(N,) float32, unweighted, at given timesteps (N,) and with the captions of `dropped` (N,) left out."""
        # moments => latents
        latents = self.sample_latents(batch.image_latents, draws)
        # captions => what the U-Net may attend to
        text = self.conditioning(batch, dropped)
        # latents => noisy latents
        noise = self.noise(tuple(latents.shape[1:]), draws)
        noisy = self.add_noise(latents, noise, timesteps)
        # noisy latents => prediction => loss
        prediction = unet(noisy, timesteps, text.states, encoder_attention_mask=text.mask).sample
        target = self.target(latents, noise, timesteps)
        return F.mse_loss(prediction.float(), target, reduction="none").flatten(1).mean(dim=1)

    def timesteps(self, draws: Draws) -> Tensor:
        """(N,) int64 in [0, num_train_timesteps); with flow matching float32 in (0, num_train_timesteps]."""
        scale = self.config.num_train_timesteps
        if not self.flow:
            return draws.integers(Purpose.TIMESTEP, scale)
        if self.config.timestep_sampling == "uniform":
            return draws.uniform(Purpose.TIMESTEP) * scale
        normals = draws.normal(Purpose.TIMESTEP, ())
        return torch.sigmoid(self.config.logit_mean + self.config.logit_std * normals) * scale

    def fixed_timesteps(self, count: int) -> list[int] | list[float]:
        """The middles of `count` equal parts of the range."""
        middles = [(k + 0.5) * self.config.num_train_timesteps / count for k in range(count)]
        return middles if self.flow else [int(middle) for middle in middles]

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Latents at `timesteps`: of DDPM's variance-preserving path, or of the straight line from data to noise.

        The line is rectified flow's (Liu et al., 2022): x_t = (1 − t)·x_0 + t·noise.
        """
        if not self.flow:
            return self.scheduler.add_noise(latents, noise, timesteps)
        t = (timesteps / self.config.num_train_timesteps)[:, None, None, None]
        return (1.0 - t) * latents + t * noise

    def by_quarter(self, losses: Tensor, draws: Draws) -> Tensor:
        """(2, 4) float32: for each quarter of the timesteps, the sum of these samples' losses (N,), and their number.

        No sample's place on the time axis depends on the others, so sums over microbatches and ranks add up.
        """
        quarters = (self.timesteps(draws) * NUM_QUARTERS / self.config.num_train_timesteps).long()
        member = F.one_hot(quarters.clamp(max=NUM_QUARTERS - 1), NUM_QUARTERS).float()  # (N, 4)
        # where, not a product: a loss that is not finite stays in its own quarter
        sums = torch.where(member > 0, losses[:, None], 0.0).sum(dim=0)
        return torch.stack([sums, member.sum(dim=0)])

    def noise(self, shape: tuple[int, ...], draws: Draws) -> Tensor:
        """(N, *shape) standard normals, with an offset per channel where configured."""
        noise = draws.normal(Purpose.NOISE, shape)
        if self.config.offset_noise:
            noise = noise + self.config.offset_noise * draws.normal(Purpose.OFFSET_NOISE, (shape[0], 1, 1))
        return noise

    def weights(self, timesteps: Tensor) -> Tensor | float:
        """Each sample's weight: 1, or min(SNR, γ) in terms of the latents, put in terms of what is predicted.

        An error in the noise, or the velocity, is one in the latents times SNR, or SNR + 1.
        """
        gamma = self.config.min_snr_gamma
        if gamma is None:
            return 1.0
        alpha = self.scheduler.alphas_cumprod[timesteps]
        snr = alpha / (1.0 - alpha)
        return snr.clamp(max=gamma) / {"epsilon": snr, "v_prediction": snr + 1.0, "sample": 1.0}[self.config.prediction]

    def sample_latents(self, stored: Tensor, draws: Draws) -> Tensor:
        """(N, planes, h, w) stored latents → (N, C, h, w) float32: mean + σ·n where moments are stored, scaled."""
        if self.spec.posterior == "mean":
            return stored.float() * self.spec.scaling_factor
        mean, log_variance = stored.float().chunk(2, dim=1)
        deviation = (0.5 * log_variance.clamp(*LOG_VARIANCE_RANGE)).exp()
        return (mean + deviation * draws.normal(Purpose.POSTERIOR, tuple(mean.shape[1:]))) * self.spec.scaling_factor

    def conditioning(self, batch: Batch, dropped: Tensor) -> Conditioning:
        """Text latents as stored → float32; those of `dropped` samples, (N,) booleans, become the empty caption's."""
        states = (
            batch.text_latents.float()
            if batch.text_scales is None
            else dequantise(batch.text_latents, batch.text_scales)
        )
        states = torch.where(dropped[:, None, None], self.uncond.float(), states)
        if not self.spec.trim:
            return Conditioning(states, None)
        num_tokens = torch.where(dropped, self.spec.uncond_tokens, batch.num_tokens)
        places = torch.arange(states.shape[1], device=states.device)
        return Conditioning(states, (places < num_tokens[:, None]).float())

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """What the U-Net should have predicted.

        The noise, the velocity of Salimans and Ho (2022), the latents; or the flow's dx_t/dt = noise − x_0.
        """
        if self.flow:
            return noise - latents
        if self.config.prediction == "epsilon":
            return noise
        if self.config.prediction == "v_prediction":
            return self.scheduler.get_velocity(latents, noise, timesteps)
        return latents
