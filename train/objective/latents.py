"""Conversion of stored columns to network inputs: moments become latents, and text latents become conditioning."""

from dataclasses import replace

import torch
from torch import Tensor

from shards.format import image
from shards.format.text import TextLatents, dequantise
from shards.format.towers import TextTower
from train.data.batch import Batch
from train.data.spec import DataSpec
from train.model.backbone import BackboneConfig
from train.model.inputs import Conditioning, TextConditioning


class StoredLatents:
    """Converter for batches from the roots that a `DataSpec` describes. Its constants are moved to the device once."""

    def __init__(self, spec: DataSpec, device: torch.device, backbone: BackboneConfig):
        """Prepare the constants on the device. `backbone` must have its text towers resolved."""
        self.image = spec.image
        self.scale, self.shift = (
            torch.tensor(values, device=device)[:, None, None] for values in (spec.image.scale, spec.image.shift)
        )
        self.texts = {name: spec.texts[name] for name in backbone.text_towers}
        self.empty = {name: self._replacement(spec.uncond[name], backbone.dropped, device) for name in self.texts}
        # (tokens,) token positions, created once instead of for every microbatch
        self.places = {name: torch.arange(tower.length, device=device) for name, tower in self.texts.items()}
        self.num_empty = {name: torch.tensor(empty.num_tokens, device=device) for name, empty in self.empty.items()}
        self.backbone = backbone

    def sample(self, batch: Batch, normals: Tensor | None) -> Tensor:
        """Return normalized image latents, (N, C, h, w) float32.

        If the batch stores moments, the latents are drawn as mean + σ·normals before normalization.

        Args:
            normals: (N, C, h, w) standard normals; None if the batch stores no moments.
        """
        stored = image.unpack(batch.columns["image_latents"], batch.columns.get("image_scales"))
        if normals is None:
            return self.normalise(stored)
        return self.normalise(image.draw(stored, normals))

    def normalise(self, latents: Tensor) -> Tensor:
        """Return (latents - shift) × scale, which is how diffusers' pipelines normalize latents."""
        return (latents - self.shift) * self.scale

    @property
    def drops_per_sample(self) -> int:
        """Number of caption dropout decisions per sample: one, or one per text tower if they are independent."""
        return len(self.texts) if self.backbone.drop == "apart" else 1

    def conditioning(self, batch: Batch, dropped: Tensor) -> Conditioning:
        """Build the conditioning from a batch's sizes and its text latents, converted to float32.

        Args:
            dropped: booleans, True where a caption is dropped: (N,) for all towers together, or (N, towers) for each
                tower independently.
        """
        columns = dropped.reshape(len(batch), -1).expand(-1, len(self.texts)).unbind(1)
        texts = {}
        for (name, tower), is_dropped in zip(self.texts.items(), columns, strict=True):
            texts[name] = self._text(name, tower, batch, is_dropped)
        height, width = batch.columns["image_latents"].shape[2:]
        pixels = (height * self.image.downsampling, width * self.image.downsampling)
        return Conditioning(texts, batch.columns["size"], pixels)

    def perturb_sizes(self, batch: Batch, jitter: Tensor | None, dropped: Tensor | None) -> Batch:
        """Return the batch with jittered and dropped original sizes.

        Args:
            jitter: (N,) standard normals; each size is scaled by exp(`size_jitter` · normal). None: no scaling.
            dropped: (N, 1) booleans, True where the size is set to 0, which means unknown. None: no size is dropped.
        """
        sizes = batch.columns["size"]
        if jitter is not None:
            factor = (self.backbone.size_jitter * jitter).exp()
            sizes = (sizes * factor[:, None]).round().to(sizes.dtype)
        if dropped is not None:
            sizes = sizes * ~dropped
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

    def _replacement(self, empty: TextLatents, dropped: str, device: torch.device) -> TextLatents:
        """Return the float32 replacement for a dropped caption's latents: the empty caption's latents, or zeros."""
        states, pooled = (None if value is None else value.to(device).float() for value in (empty.states, empty.pooled))
        if dropped == "zeros":
            states, pooled = (None if value is None else torch.zeros_like(value) for value in (states, pooled))
        return TextLatents(states, empty.num_tokens, pooled)
