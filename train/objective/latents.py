"""What a batch's stored numbers mean: posterior moments → latents, text latents → what the U-Net may attend to."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shards.format import image
from shards.format.text import dequantise
from train.data.batch import Batch
from train.data.draws import Draws, Purpose
from train.data.spec import DataSpec


@dataclass(frozen=True)
class Conditioning:
    """What the U-Net sees of the captions."""

    states: Tensor
    """(N, tokens, width) float32."""
    mask: Tensor | None
    """(N, tokens), 1 where a token is real; None where all are to be seen, padding included, as in SD."""


class StoredLatents:
    """Reads batches of the roots that a `DataSpec` describes."""

    def __init__(self, spec: DataSpec, device: torch.device):
        """Raises RequestError where it is not one text tower whose states are read."""
        self.image = spec.image
        self.scale, self.shift = (
            torch.tensor(values, device=device)[:, None, None] for values in (spec.image.scale, spec.image.shift)
        )
        self.name, self.text = spec.text
        self.empty = spec.uncond[self.name]
        assert self.empty.states is not None
        self.uncond = self.empty.states.to(device)

    def size(self, batch: Batch) -> int:
        """Numbers in one sample's latents: C·h·w."""
        return math.prod(batch.columns["image_latents"].shape[2:]) * self.image.channels

    def draws_per_sample(self, batch: Batch) -> dict[Purpose, int]:
        """How many normals `sample` takes of each sample."""
        return {Purpose.POSTERIOR: self.size(batch)} if self.image.posterior == "moments" else {}

    def sample(self, batch: Batch, draws: Draws) -> Tensor:
        """A batch's image latents, (N, C, h, w) float32: mean + σ·n where moments are stored, normalised."""
        stored = image.unpack(batch.columns["image_latents"], batch.columns.get("image_scales"))
        if self.image.posterior != "moments":
            return self.normalise(stored)
        shape = (self.image.channels, *stored.shape[2:])
        return self.normalise(image.draw(stored, draws.normal(Purpose.POSTERIOR, shape)))

    def normalise(self, latents: Tensor) -> Tensor:
        """(latents - shift) × scale, as diffusers' pipelines have it."""
        return (latents - self.shift) * self.scale

    def conditioning(self, batch: Batch, dropped: Tensor) -> Conditioning:
        """Text latents as stored → float32; those of `dropped` samples, (N,) booleans, become the empty caption's."""
        stored, scales = (batch.columns.get(f"{kind}.{self.name}") for kind in ("text_latents", "text_scales"))
        assert stored is not None
        states = stored.float() if scales is None else dequantise(stored, scales)
        states = torch.where(dropped[:, None, None], self.uncond.float(), states)
        if not self.text.hides_padding:
            return Conditioning(states, None)
        num_tokens = torch.where(dropped, self.empty.num_tokens, batch.columns[f"num_tokens.{self.name}"])
        places = torch.arange(states.shape[1], device=states.device)
        return Conditioning(states, (places < num_tokens[:, None]).float())
