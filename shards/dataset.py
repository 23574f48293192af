"""A StreamingDataset with decoded samples, for training loops other than latentmill's own."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming import StreamingDataset
from torch import Tensor

from shards.base.errors import RequestError
from shards.base.store import parse_place
from shards.format import image
from shards.format.encoding import EncodingRecord
from shards.format.text import pad_tokens, unpack_stored, with_duplicate_text
from shards.open import open_store
from shards.root.exclusions import exclusion_ids
from shards.root.reading import captions, decoded, features, image_latents


class LatentDataset(StreamingDataset):
    """One bucket of a latents root, decoded to float32 model inputs.

    A sample is a dict with these entries:

    key                 str
    captions            list of str
    image_latents       (C, h, w), normalised: (latents - shift) × scale. If the root stores moments, every access
                        draws a new sample from the posterior
    text.NAME           (captions, tokens, width), zero-padded where trimmed; width is the stored (projected) width
    text_mask.NAME      (captions, tokens) bool, True for tokens that the model may attend to
    pooled.NAME         (captions, pooled)
    features.NAME       (tokens, width)
    size, scores        as stored
    """

    def __init__(
        self,
        root: Path | str,
        bucket: str,
        posterior_mean: bool = False,
        include_excluded: bool = False,
        **options: Any,
    ):
        """
        Args:
            root: a latents root, as a local folder or a URL. For a URL, also pass `local`, the folder that streaming
                downloads to.
            bucket: WIDTHxHEIGHT in pixels.
            posterior_mean: return the posterior's mean instead of a sample from it.
            include_excluded: accept a root with exclusion lists, and return the samples that they exclude, too.
            options: options of StreamingDataset, such as batch_size and shuffle.

        Raises:
            RequestError: `root` is not a latents root, or it has exclusion lists.
        """
        store = open_store(root)
        self.encoding = EncodingRecord.load(store)
        if not include_excluded and (ids := exclusion_ids(store)):
            raise RequestError(
                f"{store.where()} has exclusion lists ({', '.join(f'exclusions/{id}.txt' for id in ids)}), which only "
                f"latentmill's trainer applies. Write a root without the excluded samples (`python -m shards derive "
                f"{store.where()} OUTPUT`, which also copies the lists), and pass include_excluded=True to read it."
            )
        self.posterior_mean = posterior_mean
        place = parse_place(root)
        if isinstance(place, Path):
            super().__init__(local=str(place / bucket), **options)
        else:
            super().__init__(remote=f"{place}/{bucket}", **options)

    def __getitem__(self, at: Any) -> Any:
        """Return one sample, or a list of samples if `at` is a slice or a list."""
        stored = super().__getitem__(at)
        if not isinstance(stored, dict):
            return stored
        number = at % self.size
        _, row = self.spanner[number]
        read = super().__getitem__
        return self.decode(with_duplicate_text(stored, row, lambda first: read(number - row + first)))

    def decode(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Convert one sample's stored columns to the entries listed in the class docstring."""
        sample = {name: columns[name] for name in ("key", "size", "scores")}
        sample |= {"captions": captions(columns, self.encoding), "image_latents": self._latents(columns)}
        rows = unpack_stored(columns)
        for name, tower in self.encoding.texts.items():
            if tower.states:
                states = [decoded(row, f"text_latents.{name}", f"text_scales.{name}") for row in rows]
                sample[f"text.{name}"] = torch.from_numpy(np.stack([pad_tokens(s, tower.length) for s in states]))
                counts = torch.tensor([int(row[f"num_tokens.{name}"]) for row in rows])
                sample[f"text_mask.{name}"] = torch.arange(tower.length) < counts[:, None]
            if tower.pooled:
                pooled = np.stack([row[f"pooled.{name}"] for row in rows])
                sample[f"pooled.{name}"] = torch.from_numpy(pooled).float()
        for name, stored in features(columns, self.encoding).items():
            sample[f"features.{name}"] = torch.from_numpy(stored)
        return sample

    def _latents(self, columns: dict[str, Any]) -> Tensor:
        tower = self.encoding.image
        latents = torch.from_numpy(image_latents(columns))
        if tower.posterior == "moments":
            mean = latents[: tower.channels]
            latents = mean if self.posterior_mean else image.draw(latents, torch.randn_like(mean))
        shift, scale = (torch.tensor(values)[:, None, None] for values in (tower.shift, tower.scale))
        return (latents - shift) * scale
