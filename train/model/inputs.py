"""A batch's conditioning → keyword arguments of a backbone, by one small object for each kind of input.

torch is imported inside the functions that need it: reading a config or a root must not cost its import.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shards.base.config import Config
from shards.format.towers import TextTower

if TYPE_CHECKING:
    from torch import Tensor

SizeName = Literal["original", "crop", "target", "aspect_ratio"]


@dataclass(frozen=True)
class TextConditioning:
    """What one text tower made of the captions."""

    states: Tensor | None
    """(N, tokens, width) float32; None: it is pooled only."""
    mask: Tensor | None
    """(N, tokens), 1 where a token is real; None where all are to be seen, padding included, as in SD."""
    pooled: Tensor | None
    """(N, pooled) float32."""

    def take(self, rows: slice | Tensor) -> TextConditioning:
        """Of those samples."""
        parts = (None if value is None else value[rows] for value in (self.states, self.mask, self.pooled))
        return TextConditioning(*parts)


@dataclass(frozen=True)
class Conditioning:
    """What a backbone may be told of a batch beside its latents."""

    texts: dict[str, TextConditioning]
    sizes: Tensor
    """(N, 4): each original's width and height, and the crop's top and left in it."""
    target: tuple[int, int]
    """(height, width) of the bucket, in pixels."""

    def take(self, rows: slice | Tensor) -> Conditioning:
        """Of those samples."""
        return Conditioning({name: text.take(rows) for name, text in self.texts.items()}, self.sizes[rows], self.target)


@dataclass(frozen=True)
class Given:
    """All that an argument may be made of."""

    conditioning: Conditioning
    grid: tuple[int, int]
    """(h, w) of the latents' patches."""
    made: dict[str, Tensor | None]
    """The arguments before it."""


class States(Config):
    """Hidden states of captions, (N, tokens, width)."""

    kind: Literal["states"] = "states"
    """Of input."""
    towers: list[list[str]] | None = Field(None, min_length=1)
    """Those of an inner list stand side by side along the width; the lists one after the other along the tokens, the
    narrower ones filled with zeros. null: the one text tower that is read."""
    mask: str | None = None
    """The argument that is told which tokens are real, where a tower hides padding."""

    @property
    def names(self) -> list[str]:
        """Of its towers."""
        return [name for row in self.towers or [] for name in row]

    def arguments(self, name: str, given: Given) -> dict[str, Tensor | None]:
        """The states, and their mask where there is an argument for it."""
        import torch.nn.functional as F

        texts = given.conditioning.texts
        rows = [_beside(texts[tower].states for tower in row) for row in self.towers or []]
        width = max(row.shape[-1] for row in rows)
        wide = (row if row.shape[-1] == width else F.pad(row, (0, width - row.shape[-1])) for row in rows)
        states = _behind(list(wide))
        masks = [texts[row[0]].mask for row in self.towers or []]
        if self.mask is None:
            return {name: states}
        if all(mask is None for mask in masks):
            return {name: states, self.mask: None}
        ones = (row.new_ones(row.shape[:2]) for row in rows)
        return {name: states, self.mask: _behind([one if m is None else m for one, m in zip(ones, masks, strict=True)])}


class Pooled(Config):
    """Pooled outputs of text towers, side by side, (N, width)."""

    kind: Literal["pooled"]
    """Of input."""
    towers: list[str] = Field(min_length=1)
    """In this order."""

    @property
    def names(self) -> list[str]:
        """Of its towers."""
        return self.towers

    def arguments(self, name: str, given: Given) -> dict[str, Tensor | None]:
        """The pooled outputs."""
        return {name: _beside(given.conditioning.texts[tower].pooled for tower in self.towers)}


class Sizes(Config):
    """What became of the picture, in pixels, (N, numbers) float32."""

    kind: Literal["sizes"]
    """Of input."""
    of: list[SizeName] = Field(["original", "crop", "target"], min_length=1)
    """`original` and `target`: height and width of the picture and of its bucket; `crop`: top and left of the bucket on
    the picture as scaled (Podell et al., 2023); `aspect_ratio`: of the original, height / width. Of an original of
    0 × 0 all are 0."""

    def arguments(self, name: str, given: Given) -> dict[str, Tensor | None]:
        """The numbers, one after the other."""
        import torch

        known = given.conditioning.sizes[:, 0] > 0
        width, height, top, left = given.conditioning.sizes.long().clamp(min=1 - known.long()[:, None]).unbind(1)
        target_height, target_width = given.conditioning.target
        # the picture is scaled to cover the bucket, both sides to whole pixels (precompute/pixels/resample.py)
        narrow = width * target_height < height * target_width
        scaled_height = torch.where(narrow, _rounded(height * target_width, width), target_height)
        scaled_width = torch.where(narrow, target_width, _rounded(width * target_height, height))
        numbers = {
            "original": (height, width),
            "crop": (_rounded(top * scaled_height, height), _rounded(left * scaled_width, width)),
            "target": (torch.full_like(height, target_height), torch.full_like(width, target_width)),
            "aspect_ratio": (height / width,),
        }
        told = torch.stack([number.float() for of in self.of for number in numbers[of]], dim=1)
        return {name: told * known[:, None]}


class Positions(Config):
    """(tokens, 3) float32 for rotary embeddings: 0, row and column of each patch; zeros for a caption's tokens."""

    kind: Literal["positions"]
    """Of input."""
    of: Literal["image", "text"]
    """`text`: of the states that are made before it."""

    def arguments(self, name: str, given: Given) -> dict[str, Tensor | None]:
        """The positions."""
        import torch

        device = given.conditioning.sizes.device
        if self.of == "text":
            num_tokens = max(value.shape[1] for value in given.made.values() if value is not None and value.ndim == 3)
            return {name: torch.zeros(num_tokens, 3, device=device)}
        rows, columns = (torch.arange(number, dtype=torch.float32, device=device) for number in given.grid)
        return {name: torch.cartesian_prod(torch.zeros(1, device=device), rows, columns)}


class Guidance(Config):
    """The guidance scale that a backbone is told of, (N,) float32."""

    kind: Literal["guidance"]
    """Of input."""
    scale: float = 1.0
    """As a sampler would give it."""

    def arguments(self, name: str, given: Given) -> dict[str, Tensor | None]:
        """The same for all samples."""
        import torch

        sizes = given.conditioning.sizes
        return {name: torch.full((len(sizes),), self.scale, device=sizes.device)}


Input = Annotated[States | Pooled | Sizes | Positions | Guidance, Field(discriminator="kind")]


def example(texts: dict[str, TextTower], target: tuple[int, int]) -> Conditioning:
    """Conditioning of one sample, of the shapes that these towers give, on the current default device."""
    import torch

    return Conditioning(
        {
            name: TextConditioning(
                torch.zeros(1, tower.length, tower.width) if tower.states else None,
                torch.ones(1, tower.length) if tower.states and tower.hides_padding else None,
                torch.zeros(1, tower.pooled) if tower.pooled else None,
            )
            for name, tower in texts.items()
        },
        torch.ones(1, 4),
        target,
    )


def _rounded(a: Tensor, b: Tensor) -> Tensor:
    """a / b to the nearest whole number, halves up."""
    return (2 * a + b) // (2 * b)


def _beside(parts: Iterable[Tensor | None]) -> Tensor:
    import torch

    found = [part for part in parts if part is not None]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _behind(parts: list[Tensor]) -> Tensor:
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
