"""The training loss: noise is added to a sample's latents along a path, and the backbone predicts the path's target."""

import math
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
class RandomTensors:
    """All random tensors of a step for N samples, except the choice of captions (`Batch.draw_captions`)."""

    timesteps: Tensor
    """(N,) timesteps, as drawn by the path before any shift."""
    dropped: Tensor
    """Booleans, True where a caption is dropped: (N, 1), or (N, towers) if text towers are dropped independently."""
    noise: Tensor
    """(N, C, h, w) float32 standard normals, plus the offset noise if configured."""
    posterior: Tensor | None = None
    """(N, C, h, w) float32 standard normals for drawing latents from their moments; None: no moments are stored."""
    size_jitter: Tensor | None = None
    """(N,) float32 standard normals that scale the original sizes; None: no size jitter."""
    size_dropped: Tensor | None = None
    """(N, 1) booleans, True where the original size is dropped; None: no size dropout."""


@dataclass(frozen=True)
class NoisyBatch:
    """The inputs of a forward pass and the target of its prediction."""

    batch: Batch
    """The samples as stored, with one caption each."""
    dropped: Tensor
    """Booleans, (N,) or (N, towers), True where a caption is dropped."""
    latents: Tensor
    """(N, C, h, w) float32 noisy latents."""
    target: Tensor
    """(N, C, h, w) float32 target of the prediction."""
    timesteps: Tensor
    """(N,) timesteps."""
    weight: Tensor | None = None
    """(N,) weights of the samples' losses; None: all weights are 1."""
    coefficient: float = 0.0
    """Coefficient of the alignment loss, if a layer is aligned."""
    num_real: int | None = None
    """Number of samples that count toward the loss; the samples after these are padding. None: all samples count."""

    def __len__(self) -> int:
        return len(self.batch)

    def microbatches(self, size: int, filled: bool = False) -> Iterator["NoisyBatch"]:
        """Yield slices of at most `size` samples, in order.

        Args:
            filled: pad a smaller slice to `size` by repeating its own samples; the repetitions do not count.
        """
        for start in range(0, len(self), size):
            part = self._take(slice(start, start + size))
            if filled and len(part) < size:
                rows = torch.arange(size, device=self.latents.device) % len(part)
                part = replace(part._take(rows), num_real=len(part))
            yield part

    def _take(self, rows: slice | Tensor) -> "NoisyBatch":
        return replace(
            self,
            batch=self.batch.take(rows),
            dropped=self.dropped[rows],
            latents=self.latents[rows],
            target=self.target[rows],
            timesteps=self.timesteps[rows],
            weight=None if self.weight is None else self.weight[rows],
        )


@dataclass(frozen=True)
class Losses:
    """The losses of a microbatch."""

    per_sample: Tensor
    """(N,) float32 mean squared error over each sample's latents, weighted as configured."""
    aligned: Tensor | None = None
    """(N,) alignment losses (REPA): −mean cosine between the aligned layer and the features. None: no layer is
    aligned."""
    coefficient: float = 0.0
    """Coefficient of the alignment losses in the total."""

    @property
    def total(self) -> Tensor:
        """(N,) losses to minimize."""
        return self.per_sample if self.aligned is None else self.per_sample + self.coefficient * self.aligned


class DiffusionLoss:
    """The training loss: draws a step's random tensors, adds noise to a batch, and scores the backbone's prediction."""

    def __init__(
        self,
        config: ObjectiveConfig,
        spec: DataSpec,
        device: torch.device,
        backbone: BackboneConfig | None = None,
        *,
        aligned: Aligned | None = None,
    ):
        """Prepare the path and the constants on `device`.

        Args:
            aligned: the unwrapped network with its projection head, if a layer is aligned.

        Raises:
            RequestError: the backbone reads a text tower that the data does not have.
        """
        self.aligned = aligned
        self.path = noise_path(config, device)
        self.backbone = (backbone or BackboneConfig()).resolved(spec.texts)
        self.latents = StoredLatents(spec, device, self.backbone)
        self.caption_dropout, self.offset_noise = config.caption_dropout, config.offset_noise

    def draw(self, batch: Batch, draws: Draws) -> RandomTensors:
        """Draw all random tensors for a step on this batch.

        All numbers come from one call to the generator, because on a GPU, a small kernel takes as long to launch as a
        large one. The numbers for one purpose do not depend on the other purposes.
        """
        height, width = batch.columns["image_latents"].shape[2:]
        shape = (self.latents.image.channels, height, width)
        num_drops = self.latents.drops_per_sample
        has_moments = self.latents.image.posterior == "moments"
        jitter, size_dropout = self.backbone.size_jitter, self.backbone.size_dropout

        counts = {Purpose.TIMESTEP: 1, Purpose.CAPTION_DROPOUT: num_drops, Purpose.NOISE: math.prod(shape)}
        if has_moments:
            counts[Purpose.POSTERIOR] = math.prod(shape)
        if jitter:
            counts[Purpose.SIZE_JITTER] = 2  # each normal sample consumes two random words
        if size_dropout:
            counts[Purpose.SIZE_DROPOUT] = 1
        if self.offset_noise:
            counts[Purpose.OFFSET_NOISE] = shape[0]
        draws.draw(counts)

        noise = draws.normal(Purpose.NOISE, shape)
        if self.offset_noise:
            noise = noise + self.offset_noise * draws.normal(Purpose.OFFSET_NOISE, (shape[0], 1, 1))
        return RandomTensors(
            timesteps=self.path.timesteps(draws),
            dropped=draws.bernoulli(Purpose.CAPTION_DROPOUT, self.caption_dropout, num_drops),
            noise=noise,
            posterior=draws.normal(Purpose.POSTERIOR, shape) if has_moments else None,
            size_jitter=draws.normal(Purpose.SIZE_JITTER, ()) if jitter else None,
            size_dropped=draws.bernoulli(Purpose.SIZE_DROPOUT, size_dropout, 1) if size_dropout else None,
        )

    def add_noise(self, batch: Batch, draws: Draws) -> NoisyBatch:
        """Draw a step's random tensors, and add noise to a batch that has one caption per sample."""
        random = self.draw(batch, draws)
        height, width = batch.columns["image_latents"].shape[2:]
        timesteps = self.path.shifted(random.timesteps, (height, width))
        batch = self.latents.perturb_sizes(batch, random.size_jitter, random.size_dropped)
        noisy = self.add_noise_at(batch, timesteps, random.dropped, random)
        coefficient = self.aligned.config.coefficient(draws.step) if self.aligned is not None else 0.0
        return replace(noisy, weight=self.path.weight(timesteps), coefficient=coefficient)

    def add_noise_at(self, batch: Batch, timesteps: Tensor, dropped: Tensor, random: RandomTensors) -> NoisyBatch:
        """Add noise to a batch at the given timesteps (N,). Every sample gets weight 1.

        Args:
            dropped: booleans, (N,) or (N, towers), True where a caption is dropped.
            random: the noise, and the normals for drawing latents from their moments.
        """
        # moments => latents
        latents = self.latents.sample(batch, random.posterior)
        # latents => noisy latents and target
        noisy = self.path.add_noise(latents, random.noise, timesteps)
        target = self.path.target(latents, random.noise, timesteps)
        return NoisyBatch(batch, dropped, noisy, target, timesteps)

    def __call__(self, network: nn.Module, noisy: NoisyBatch) -> Losses:
        """Run the network and return the losses of the samples that count."""
        errors, real = self.squared_error(network, noisy), slice(noisy.num_real)
        weighted = errors if noisy.weight is None else noisy.weight[real] * errors
        losses = Losses(weighted)
        if self.aligned is None:
            return losses
        aligned = self.aligned.loss(noisy.batch)[real]
        return replace(losses, aligned=aligned, coefficient=noisy.coefficient)

    def squared_error(self, network: nn.Module, noisy: NoisyBatch) -> Tensor:
        """Run the network and return the unweighted errors, (N,) float32, of the samples that count."""
        # text latents are converted to float32 per microbatch, because they are the largest part of a batch
        conditioning = self.latents.conditioning(noisy.batch, noisy.dropped)
        prediction = self.backbone.predict(network, noisy.latents, noisy.timesteps, conditioning).float()
        target = noisy.target
        if noisy.num_real is not None:
            prediction, target = prediction[: noisy.num_real], target[: noisy.num_real]
        errors = F.mse_loss(prediction, target, reduction="none")
        return errors.flatten(1).mean(dim=1)
