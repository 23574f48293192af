"""Conversion of a batch's conditioning into a backbone's keyword arguments, with one config class per kind of input.

torch is imported inside the functions that need it, so that reading a config stays fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shards.base.config import Config
from shards.format.towers import TextTower

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_MULTIPLE = 8
"""Masked states are padded with hidden tokens to a multiple of this number. With other lengths, PyTorch's compiler may
lay out the mask in a way that attention on a GPU rejects ("(*bias): last dimension must be contiguous")."""
SizeName = Literal["original", "crop", "target", "aspect_ratio"]


@dataclass(frozen=True)
class TextConditioning:
    """Outputs of one text tower for the captions of a batch."""

    states: Tensor | None
    """(N, tokens, width) float32; None if only the pooled output is used."""
    mask: Tensor | None
    """(N, tokens), 1 for real tokens; None if the network attends to all tokens, including padding, as Stable Diffusion
    does."""
    pooled: Tensor | None
    """(N, pooled) float32."""


@dataclass(frozen=True)
class Conditioning:
    """Everything that a backbone may be conditioned on, for a batch."""

    texts: dict[str, TextConditioning]
    sizes: Tensor
    """(N, 4): width and height of each original image, and top and left offset of the crop in it, in pixels."""
    target: tuple[int, int]
    """(height, width) of the bucket in pixels."""


@dataclass(frozen=True)
class InputContext:
    """Data from which an input computes its arguments."""

    conditioning: Conditioning
    grid: tuple[int, int]
    """Number of rows and columns of the latents' patches."""
    made: dict[str, Tensor | None]
    """Arguments that earlier inputs have computed, by name."""


class States(Config):
    """Hidden states of captions, (N, tokens, width)."""

    kind: Literal["states"] = "states"
    """Kind of input."""
    towers: list[list[str]] | None = Field(None, min_length=1)
    """Text towers. Towers in the same inner list are concatenated along the width. The results are zero-padded to the
    same width and concatenated along the tokens. null: the only text tower that is read."""
    mask: str | None = None
    """Name of the argument that receives the mask of real tokens, if a tower hides padding."""
    summed: bool = False
    """Add the states of towers in the same inner list instead of concatenating them. Set automatically for towers that
    stage 1 projected jointly (`text.joint`); do not set it yourself."""

    @property
    def names(self) -> list[str]:
        """Names of the text towers."""
        return [name for row in self.towers or [] for name in row]

    @property
    def lists(self) -> tuple[tuple[str, ...], ...]:
        """The inner lists of towers, as in `Projection.joint`."""
        return tuple(map(tuple, self.towers or []))

    def width(self, texts: Mapping[str, TextTower]) -> int:
        """Return the width of the network's text input, given the towers' records."""
        combine = max if self.summed else sum
        return max(combine([texts[name].width for name in towers]) for towers in self.lists)

    def arguments(self, name: str, context: InputContext) -> dict[str, Tensor | None]:
        """Return the states and, if configured, their mask, padded to a multiple of TOKEN_MULTIPLE tokens if masked."""
        import torch.nn.functional as F

        texts = context.conditioning.texts
        combine = _add if self.summed else _concatenate_width
        rows = [combine(texts[tower].states for tower in row) for row in self.towers or []]
        width = max(row.shape[-1] for row in rows)
        wide = (row if row.shape[-1] == width else F.pad(row, (0, width - row.shape[-1])) for row in rows)
        states = _concatenate_tokens(list(wide))
        masks = [texts[row[0]].mask for row in self.towers or []]
        if self.mask is None:
            return {name: states}
        if all(mask is None for mask in masks):
            return {name: states, self.mask: None}
        whole = [row.new_ones(row.shape[:2]) if mask is None else mask for row, mask in zip(rows, masks, strict=True)]
        padding = -states.shape[1] % TOKEN_MULTIPLE
        return {
            name: F.pad(states, (0, 0, 0, padding)),
            self.mask: F.pad(_concatenate_tokens(whole), (0, padding)),
        }


class Pooled(Config):
    """Concatenated pooled outputs of text towers, (N, width)."""

    kind: Literal["pooled"]
    """Kind of input."""
    towers: list[str] = Field(min_length=1)
    """Text towers, in the order of concatenation."""

    @property
    def names(self) -> list[str]:
        """Names of the text towers."""
        return self.towers

    def arguments(self, name: str, context: InputContext) -> dict[str, Tensor | None]:
        """Return the pooled outputs."""
        return {name: _concatenate_width(context.conditioning.texts[tower].pooled for tower in self.towers)}


class Sizes(Config):
    """Sizes of the original image and position of the crop in pixels, (N, numbers) float32."""

    kind: Literal["sizes"]
    """Kind of input."""
    of: list[SizeName] = Field(["original", "crop", "target"], min_length=1)
    """Numbers to pass, in this order. `original`: height and width of the original image; `target`: height and width of
    its bucket; `crop`: top and left offset of the crop in the scaled image (Podell et al., 2023); `aspect_ratio`:
    height / width of the original image. All are 0 if the size of the original is unknown (0 × 0)."""

    def arguments(self, name: str, context: InputContext) -> dict[str, Tensor | None]:
        """Return the configured numbers, concatenated into one tensor."""
        import torch

        known = context.conditioning.sizes[:, 0] > 0
        width, height, top, left = context.conditioning.sizes.long().clamp(min=1 - known.long()[:, None]).unbind(1)
        target_height, target_width = context.conditioning.target
        # the image is scaled to cover the bucket, with both sides rounded (precompute/pixels/resample.py)
        narrow = width * target_height < height * target_width
        scaled_height = torch.where(narrow, _rounded(height * target_width, width), target_height)
        scaled_width = torch.where(narrow, target_width, _rounded(width * target_height, height))
        numbers = {
            "original": (height, width),
            "crop": (_rounded(top * scaled_height, height), _rounded(left * scaled_width, width)),
            "target": (torch.full_like(height, target_height), torch.full_like(width, target_width)),
            "aspect_ratio": (height / width,),
        }
        stated = torch.stack([number.float() for of in self.of for number in numbers[of]], dim=1)
        return {name: stated * known[:, None]}


class Positions(Config):
    """Positions for rotary embeddings, (tokens, 3) float32: (0, row, column) for patches and zeros for captions."""

    kind: Literal["positions"]
    """Kind of input."""
    of: Literal["image", "text"]
    """Tokens whose positions are passed: the latents' patches, or the tokens of the hidden states. The input of kind
    `states` must precede an input with `of: text`."""

    def arguments(self, name: str, context: InputContext) -> dict[str, Tensor | None]:
        """Return the positions."""
        import torch

        device = context.conditioning.sizes.device
        if self.of == "text":
            num_tokens = max(value.shape[1] for value in context.made.values() if value is not None and value.ndim == 3)
            return {name: torch.zeros(num_tokens, 3, device=device)}
        rows, columns = (torch.arange(number, dtype=torch.float32, device=device) for number in context.grid)
        return {name: torch.cartesian_prod(torch.zeros(1, device=device), rows, columns)}


class Guidance(Config):
    """Guidance scale of a guidance-distilled backbone, (N,) float32."""

    kind: Literal["guidance"]
    """Kind of input."""
    scale: float = 1.0
    """Guidance scale, in the units that a sampler uses."""

    def arguments(self, name: str, context: InputContext) -> dict[str, Tensor | None]:
        """Return the scale for every sample."""
        import torch

        sizes = context.conditioning.sizes
        return {name: torch.full((len(sizes),), self.scale, device=sizes.device)}


Input = Annotated[States | Pooled | Sizes | Positions | Guidance, Field(discriminator="kind")]


def example(texts: dict[str, TextTower], target: tuple[int, int], num_samples: int = 1) -> Conditioning:
    """Create dummy conditioning on the default device, with the shapes of these towers' outputs."""
    import torch

    return Conditioning(
        {
            name: TextConditioning(
                torch.zeros(num_samples, tower.length, tower.width) if tower.states else None,
                torch.ones(num_samples, tower.length) if tower.states and tower.hides_padding else None,
                torch.zeros(num_samples, tower.pooled) if tower.pooled else None,
            )
            for name, tower in texts.items()
        },
        torch.ones(num_samples, 4),
        target,
    )


def _rounded(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b rounded to the nearest integer, with halves rounded up."""
    return (2 * a + b) // (2 * b)


def _concatenate_width(parts: Iterable[Tensor | None]) -> Tensor:
    """Concatenate the parts that are not None along the width."""
    import torch

    found = [part for part in parts if part is not None]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _add(parts: Iterable[Tensor | None]) -> Tensor:
    """Add the parts that are not None."""
    first, *others = [part for part in parts if part is not None]
    for other in others:
        first = first + other
    return first


def _concatenate_tokens(parts: list[Tensor]) -> Tensor:
    """Concatenate (N, tokens, …) along the tokens."""
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
