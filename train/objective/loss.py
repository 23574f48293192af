"""The training loss: a sample's latents, noised along a path, and the U-Net's error in what it should predict."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.data.batch import Batch
from train.data.draws import Draws, Purpose
from train.data.spec import DataSpec
from train.model.backbone import BackboneConfig
from train.objective.alignment import Aligned
from train.objective.latents import StoredLatents
from train.objective.paths import ObjectiveConfig, noise_path


@dataclass(frozen=True)
class Losses:
    """Of a batch."""

    per_sample: Tensor
    """(N,) float32 mean squared error over a sample's latents, weighted as configured."""
    timesteps: Tensor
    """(N,) at which they were taken."""
    aligned: Tensor | None = None
    """(N,) −mean cosine of the aligned layer with the features, where one is (REPA)."""
    coefficient: float = 0.0
    """Of that in what is trained on."""

    @property
    def total(self) -> Tensor:
        """(N,) what is trained on."""
        return self.per_sample if self.aligned is None else self.per_sample + self.coefficient * self.aligned


class DiffusionLoss:
    """Draws latents, noise, timesteps and dropped captions for each sample, and scores the U-Net's prediction."""

    def __init__(
        self,
        config: ObjectiveConfig,
        spec: DataSpec,
        device: torch.device,
        backbone: BackboneConfig | None = None,
        *,
        aligned: Aligned | None = None,
    ):
        """`aligned`: the network whose layer is aligned, where one is, before it was wrapped.

        Raises:
            RequestError: the backbone reads a tower that there is not.
        """
        self.aligned = aligned
        self.path = noise_path(config, device)
        self.backbone = (backbone or BackboneConfig()).resolved(spec.texts)
        self.latents = StoredLatents(spec, device, self.backbone)
        self.caption_dropout, self.offset_noise = config.caption_dropout, config.offset_noise

    def __call__(self, unet: nn.Module, batch: Batch, draws: Draws) -> Losses:
        """The losses of a batch with one caption per sample."""
        num_drops = self.latents.drops_per_sample
        counts = {Purpose.TIMESTEP: 1, Purpose.CAPTION_DROPOUT: num_drops, Purpose.NOISE: self.latents.size(batch)}
        draws.draw(counts | self.latents.draws_per_sample(batch))
        height, width = batch.columns["image_latents"].shape[2:]
        timesteps = self.path.shifted(self.path.timesteps(draws), (height, width))
        dropped = draws.chances(Purpose.CAPTION_DROPOUT, self.caption_dropout, num_drops)
        errors = self.squared_error(unet, self.latents.told_sizes(batch, draws), timesteps, dropped, draws)
        losses = Losses(self.path.weight(timesteps) * errors, timesteps)
        if self.aligned is None:
            return losses
        return replace(
            losses, aligned=self.aligned.loss(batch), coefficient=self.aligned.config.coefficient(draws.step)
        )

    def squared_error(self, unet: nn.Module, batch: Batch, timesteps: Tensor, dropped: Tensor, draws: Draws) -> Tensor:
        """(N,) float32, unweighted, at given timesteps (N,) and captions left out where `dropped`."""
        # moments => latents
        latents = self.latents.sample(batch, draws)
        # captions => what the network is told
        conditioning = self.latents.conditioning(batch, dropped)
        # latents => noisy latents
        noise = self.noise(tuple(latents.shape[1:]), draws)
        noisy = self.path.add_noise(latents, noise, timesteps)
        # noisy latents => prediction => loss
        prediction = self.backbone.predict(unet, noisy, timesteps, conditioning)
        target = self.path.target(latents, noise, timesteps)
        return F.mse_loss(prediction.float(), target, reduction="none").flatten(1).mean(dim=1)

    def noise(self, shape: tuple[int, ...], draws: Draws) -> Tensor:
        """(N, *shape) standard normals, with an offset per channel where configured."""
        noise = draws.normal(Purpose.NOISE, shape)
        if self.offset_noise:
            noise = noise + self.offset_noise * draws.normal(Purpose.OFFSET_NOISE, (shape[0], 1, 1))
        return noise
