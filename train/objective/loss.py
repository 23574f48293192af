"""The training loss: a sample's latents, noised along a path, and the U-Net's error in what it should predict."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.data.batch import Batch
from train.data.draws import Draws, Purpose
from train.data.spec import DataSpec
from train.model.backbone import BackboneConfig
from train.objective.alignment import Aligned
from train.objective.config import ObjectiveConfig
from train.objective.latents import StoredLatents
from train.objective.paths import noise_path


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


@dataclass(frozen=True)
class Noised:
    """What a network is asked: samples on their way to noise, and what it should say of them."""

    batch: Batch
    """As stored."""
    dropped: Tensor
    """(N,) or (N, towers): where the empty caption stands in."""
    latents: Tensor
    """(N, C, h, w) float32, noised."""
    target: Tensor
    """(N, C, h, w) float32."""
    timesteps: Tensor
    """(N,)."""
    weight: Tensor | None = None
    """(N,) of each sample's loss; None: 1."""
    coefficient: float = 0.0
    """Of the alignment's loss, where a layer is aligned."""
    num_real: int | None = None
    """How many of the samples count, the first ones; the rest fill up a shape. None: all."""

    def __len__(self) -> int:
        return len(self.batch)

    def microbatches(self, size: int, filled: bool = False) -> Iterator["Noised"]:
        """Slices of at most `size` samples, in order.

        Args:
            filled: a slice that is smaller is filled up with its own samples over again, which do not count.
        """
        for start in range(0, len(self), size):
            found = self._each(slice(start, start + size))
            if filled and len(found) < size:
                rows = torch.arange(size, device=self.latents.device) % len(found)
                found = replace(found._each(rows), num_real=len(found))
            yield found

    def _each(self, rows: slice | Tensor) -> "Noised":
        return replace(
            self,
            batch=self.batch.take(rows),
            dropped=self.dropped[rows],
            latents=self.latents[rows],
            target=self.target[rows],
            timesteps=self.timesteps[rows],
            weight=None if self.weight is None else self.weight[rows],
        )


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

    def noised(self, batch: Batch, draws: Draws) -> Noised:
        """A batch with one caption per sample, by its draws: all at once, as a GPU takes as long to begin with few."""
        num_drops, config = self.latents.drops_per_sample, self.aligned.config if self.aligned else None
        counts = {Purpose.TIMESTEP: 1, Purpose.CAPTION_DROPOUT: num_drops, Purpose.NOISE: self.latents.size(batch)}
        draws.draw(counts | self.latents.draws_per_sample(batch) | self._offsets_per_sample)
        height, width = batch.columns["image_latents"].shape[2:]
        timesteps = self.path.shifted(self.path.timesteps(draws), (height, width))
        dropped = draws.bernoulli(Purpose.CAPTION_DROPOUT, self.caption_dropout, num_drops)
        noised = self.noised_at(self.latents.told_sizes(batch, draws), timesteps, dropped, draws)
        coefficient = config.coefficient(draws.step) if config else 0.0
        return replace(noised, weight=self.path.weight(timesteps), coefficient=coefficient)

    def noised_at(self, batch: Batch, timesteps: Tensor, dropped: Tensor, draws: Draws) -> Noised:
        """At given timesteps (N,), with captions left out where `dropped` (N,); every sample weighs 1."""
        # moments => latents
        latents = self.latents.sample(batch, draws)
        # latents => noisy latents, and what is to be predicted
        noise = self.noise(tuple(latents.shape[1:]), draws)
        noisy, target = self.path.add_noise(latents, noise, timesteps), self.path.target(latents, noise, timesteps)
        return Noised(batch, dropped, noisy, target, timesteps)

    def __call__(self, unet: nn.Module, noised: Noised) -> Losses:
        """The losses of those samples that count."""
        errors, real = self.squared_error(unet, noised), slice(noised.num_real)
        weighted = errors if noised.weight is None else noised.weight[real] * errors
        losses = Losses(weighted, noised.timesteps[real])
        if self.aligned is None:
            return losses
        aligned = self.aligned.loss(noised.batch)[real]
        return replace(losses, aligned=aligned, coefficient=noised.coefficient)

    def squared_error(self, unet: nn.Module, noised: Noised) -> Tensor:
        """(N,) float32, unweighted, of those samples that count."""
        # captions => what the network is told, of this microbatch alone: as float32 they are the most of a batch
        told = self.latents.conditioning(noised.batch, noised.dropped)
        prediction = self.backbone.predict(unet, noised.latents, noised.timesteps, told).float()
        target = noised.target
        if noised.num_real is not None:
            prediction, target = prediction[: noised.num_real], target[: noised.num_real]
        errors = F.mse_loss(prediction, target, reduction="none")
        return errors.flatten(1).mean(dim=1)

    @property
    def _offsets_per_sample(self) -> dict[Purpose, int]:
        return {Purpose.OFFSET_NOISE: self.latents.image.channels} if self.offset_noise else {}

    def noise(self, shape: tuple[int, ...], draws: Draws) -> Tensor:
        """(N, *shape) standard normals, with an offset per channel where configured."""
        noise = draws.normal(Purpose.NOISE, shape)
        if self.offset_noise:
            noise = noise + self.offset_noise * draws.normal(Purpose.OFFSET_NOISE, (shape[0], 1, 1))
        return noise
