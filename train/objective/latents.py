"""What a batch's stored numbers mean: posterior moments → latents, text latents → what a backbone may be told."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from shards.format import image
from shards.format.text import TextLatents, dequantise
from shards.format.towers import TextTower
from train.data.batch import Batch
from train.data.draws import Draws, Purpose
from train.data.spec import DataSpec
from train.model.backbone import BackboneConfig
from train.model.inputs import Conditioning, TextConditioning


class StoredLatents:
    """Reads batches of the roots that a `DataSpec` describes."""

    def __init__(self, spec: DataSpec, device: torch.device, backbone: BackboneConfig):
        """`backbone`: with its towers named."""
        self.image = spec.image
        self.scale, self.shift = (
            torch.tensor(values, device=device)[:, None, None] for values in (spec.image.scale, spec.image.shift)
        )
        self.texts = {name: spec.texts[name] for name in backbone.text_towers}
        self.empty = {name: self._stand_in(spec.uncond[name], backbone.dropped, device) for name in self.texts}
        # (tokens,) made once: a microbatch would begin with making them
        self.places = {name: torch.arange(tower.length, device=device) for name, tower in self.texts.items()}
        self.num_empty = {name: torch.tensor(empty.num_tokens, device=device) for name, empty in self.empty.items()}
        self.backbone = backbone

    def size(self, batch: Batch) -> int:
        """Numbers in one sample's latents: C·h·w."""
        return math.prod(batch.columns["image_latents"].shape[2:]) * self.image.channels

    def draws_per_sample(self, batch: Batch) -> dict[Purpose, int]:
        """How many numbers `sample` and `told_sizes` take of each sample."""
        counts = {Purpose.POSTERIOR: self.size(batch)} if self.image.posterior == "moments" else {}
        jitter = {Purpose.SIZE_JITTER: 2} if self.backbone.size_jitter else {}  # one normal takes two words
        return counts | jitter | ({Purpose.SIZE_DROPOUT: 1} if self.backbone.size_dropout else {})

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

    @property
    def drops_per_sample(self) -> int:
        """How many of a sample's text towers can be dropped, each by itself."""
        return len(self.texts) if self.backbone.drop == "apart" else 1

    def conditioning(self, batch: Batch, dropped: Tensor) -> Conditioning:
        """Text latents as stored → float32.

        Args:
            dropped: (N,) booleans, or (N, towers): where the empty caption stands in, for all towers or for each.
        """
        texts = self.texts.items()
        columns = dropped.reshape(len(batch), -1).expand(-1, len(self.texts)).unbind(1)
        image_hw = batch.columns["image_latents"].shape[2:]
        return Conditioning(
            {name: self._text(name, tower, batch, gone) for (name, tower), gone in zip(texts, columns, strict=True)},
            batch.columns["size"],
            (image_hw[0] * self.image.downsampling, image_hw[1] * self.image.downsampling),
        )

    def told_sizes(self, batch: Batch, draws: Draws) -> Batch:
        """The batch with the originals' sizes that a network is told of: some larger or smaller, some 0."""
        config, sizes = self.backbone, batch.columns["size"]
        if config.size_jitter:
            factor = (config.size_jitter * draws.normal(Purpose.SIZE_JITTER, ())).exp()
            sizes = (sizes * factor[:, None]).round().to(sizes.dtype)
        if config.size_dropout:
            sizes = sizes * ~draws.bernoulli(Purpose.SIZE_DROPOUT, config.size_dropout, 1)
        return batch if sizes is batch.columns["size"] else replace(batch, columns=batch.columns | {"size": sizes})

    def _text(self, name: str, tower: TextTower, batch: Batch, dropped: Tensor) -> TextConditioning:
        empty, mask, pooled = self.empty[name], None, None
        states = self._states(name, batch)
        if states is not None and empty.states is not None:
            states = torch.where(dropped[:, None, None], empty.states, states)
            if tower.hides_padding:
                num_tokens = torch.where(dropped, self.num_empty[name], batch.columns[f"num_tokens.{name}"])
                mask = (self.places[name] < num_tokens[:, None]).float()
        if empty.pooled is not None:
            pooled = torch.where(dropped[:, None], empty.pooled, batch.columns[f"pooled.{name}"].float())
        return TextConditioning(states, mask, pooled)

    def _states(self, name: str, batch: Batch) -> Tensor | None:
        stored, scales = (batch.columns.get(f"{kind}.{name}") for kind in ("text_latents", "text_scales"))
        if stored is None:
            return None
        return stored.float() if scales is None else dequantise(stored, scales)

    def _stand_in(self, empty: TextLatents, dropped: str, device: torch.device) -> TextLatents:
        """What stands for a dropped caption, float32 on the device."""
        states, pooled = (None if value is None else value.to(device).float() for value in (empty.states, empty.pooled))
        if dropped == "zeros":
            states, pooled = (None if value is None else torch.zeros_like(value) for value in (states, pooled))
        return TextLatents(states, empty.num_tokens, pooled)
