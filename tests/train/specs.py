"""Small data specs and batches for tests of the loss."""

import torch
from torch import Tensor

from bench.kit.roots import encoding_record
from shards.format.text import TextLatents
from shards.format.towers import ONLY_TEXT
from train.data.batch import Batch
from train.data.spec import DataSpec

CHANNELS, TOKENS, WIDTH = 4, 16, 12


class Answer(tuple[Tensor]):
    """Output of a diffusers network: a tuple with a named field."""

    @property
    def sample(self) -> Tensor:
        """The prediction."""
        return self[0]


def spec(
    uncond: Tensor | None = None,
    uncond_tokens: int = 2,
    trim: bool = False,
    **image: object,
) -> DataSpec:
    """Return a data spec with one text tower. `image` overrides fields of the image tower."""
    uncond = torch.randn(TOKENS, WIDTH).half() if uncond is None else uncond
    encoding = encoding_record(*uncond.shape, trim=trim)
    scale = image.pop("scaling_factor", 0.7)
    return DataSpec(
        image=encoding.image.model_copy(update={"channels": CHANNELS, "scale": (scale,) * CHANNELS} | image),
        texts=encoding.texts,
        features={},
        uncond={ONLY_TEXT: TextLatents(uncond, uncond_tokens)},
        streams=(),
        steps_per_epoch=1,
    )


def make_batch(
    keys: list[str],
    slots: Tensor,
    image_latents: Tensor,
    text_latents: Tensor,
    text_scales: Tensor | None = None,
    num_tokens: Tensor | None = None,
    num_captions: Tensor | None = None,
) -> Batch:
    """Return a batch with the columns of one text tower."""
    columns = {
        "image_latents": image_latents,
        "size": torch.tensor([[8 * image_latents.shape[3], 8 * image_latents.shape[2], 0, 0]] * len(image_latents)),
        f"text_latents.{ONLY_TEXT}": text_latents,
        f"text_scales.{ONLY_TEXT}": text_scales,
        f"num_tokens.{ONLY_TEXT}": torch.full((len(text_latents),), TOKENS) if num_tokens is None else num_tokens,
    }
    return Batch(keys, slots, {name: value for name, value in columns.items() if value is not None}, num_captions)
