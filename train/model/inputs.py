"""A batch's conditioning → a backbone's keyword arguments, by one small object for each kind of input.

Which arguments there are, and of what kind each is, the config says; so do the conventions that no signature shows.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from shards.base.config import Config
from shards.base.errors import RequestError
from shards.format.towers import TextTower

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


@dataclass(frozen=True)
class Conditioning:
    """What a backbone may be told of a batch beside its latents."""

    texts: dict[str, TextConditioning]
    sizes: Tensor
    """(N, 4): each original's width and height, and the crop's top and left in it."""
    target: tuple[int, int]
    """(height, width) of the bucket, in pixels."""


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
        texts = given.conditioning.texts
        rows = [_beside(texts[tower].states for tower in row) for row in self.towers or []]
        width = max(row.shape[-1] for row in rows)
        states = _behind([F.pad(row, (0, width - row.shape[-1])) for row in rows])
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
    of: list[SizeName] = Field(["original", "crop", "target"], min_length=1)
    """`original` and `target`: height and width of the picture and of its bucket; `crop`: top and left of the bucket on
    the picture as scaled (Podell et al., 2023); `aspect_ratio`: of the original, height / width."""

    def arguments(self, name: str, given: Given) -> dict[str, Tensor | None]:
        """The numbers, one after the other."""
        width, height, top, left = given.conditioning.sizes.long().unbind(1)
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
        return {name: torch.stack([number.float() for of in self.of for number in numbers[of]], dim=1)}


class Positions(Config):
    """(tokens, 3) float32 for rotary embeddings: 0, row and column of each patch; zeros for a caption's tokens."""

    kind: Literal["positions"]
    of: Literal["image", "text"]
    """`text`: of the states that are made before it."""

    def arguments(self, name: str, given: Given) -> dict[str, Tensor | None]:
        """The positions."""
        device = given.conditioning.sizes.device
        if self.of == "text":
            num_tokens = max(value.shape[1] for value in given.made.values() if value is not None and value.ndim == 3)
            return {name: torch.zeros(num_tokens, 3, device=device)}
        rows, columns = (torch.arange(number, dtype=torch.float32, device=device) for number in given.grid)
        return {name: torch.cartesian_prod(torch.zeros(1, device=device), rows, columns)}


class Guidance(Config):
    """The guidance scale that a backbone is told of, (N,) float32."""

    kind: Literal["guidance"]
    scale: float = 1.0

    def arguments(self, name: str, given: Given) -> dict[str, Tensor | None]:
        """The same for all samples."""
        sizes = given.conditioning.sizes
        return {name: torch.full((len(sizes),), self.scale, device=sizes.device)}


Input = Annotated[States | Pooled | Sizes | Positions | Guidance, Field(discriminator="kind")]


class BackboneConfig(Config):
    """The network to train, and how it is called: any of the tested diffusers classes (train/model/backbones.yaml)."""

    config: Path | None = None
    """A diffusers config (JSON) whose `_class_name` names the class; none: a UNet2DConditionModel's."""
    inputs: dict[str, Input] = Field({"encoder_hidden_states": States(mask="encoder_attention_mask")}, min_length=1)
    """Argument → what it is made of, beside latents and timesteps; `a.b` is the entry b of the dict a."""
    drop: Literal["together", "apart"] = "together"
    """Of a caption that is dropped, all towers' numbers; or each tower's by a draw of its own (Esser et al., 2024)."""
    dropped: Literal["empty", "zeros"] = "empty"
    """What stands for a dropped caption: the empty one's numbers, or zeros."""
    pack: int = Field(1, ge=1)
    """Latents are handed over as (N, h/pack · w/pack, C · pack²), and so come back; 1: as they are."""
    time_divisor: float = Field(1.0, gt=0)
    """The network is told timestep / time_divisor."""
    time_reversed: bool = False
    """And one minus that."""
    output_negated: bool = False
    """The network predicts the negative of the target."""
    further_channels: bool = False
    """Behind the prediction's channels the network has others (a variance), which are left aside."""

    @model_validator(mode="after")
    def _check(self) -> "BackboneConfig":
        if sum(isinstance(item, States) for item in self.inputs.values()) != 1:
            raise ValueError("inputs must have one of kind `states`, which may be made of several towers")
        return self

    @property
    def called(self) -> "BackboneConfig":
        """What of it changes the numbers."""
        return self.model_copy(update={"config": None})

    @property
    def states(self) -> States:
        """The input that is made of hidden states."""
        return next(item for item in self.inputs.values() if isinstance(item, States))

    @property
    def text_towers(self) -> list[str]:
        """Those that are read, each once; empty: the one that there is."""
        named = (item.names for item in self.inputs.values() if isinstance(item, States | Pooled))
        return list(dict.fromkeys(name for names in named for name in names))

    @property
    def top_arguments(self) -> list[str]:
        """The keyword arguments beside latents and timesteps."""
        masks = [self.states.mask] if self.states.mask else []
        return list(dict.fromkeys([*(name.split(".")[0] for name in self.inputs), *masks]))

    def resolved(self, texts: dict[str, TextTower]) -> "BackboneConfig":
        """With its text tower named, where it is the one that there is.

        Raises:
            RequestError: there is none, or more than one; or one that is named is not there, or lacks what is asked.
        """
        if self.states.towers is not None:
            _check_towers(self, texts)
            return self
        found = [name for name, tower in texts.items() if tower.states]
        if len(found) != 1:
            raise RequestError(
                f"A U-Net attends to one text tower's states, and {' and '.join(found) or 'none'} would be read. Name "
                f"the one in data.towers, such as [texts.{(found or ['NAME'])[0]}], or encode a root that has it."
            )
        inputs = {
            name: item.model_copy(update={"towers": [found]}) if isinstance(item, States) else item
            for name, item in self.inputs.items()
        }
        return self.model_copy(update={"inputs": inputs})

    def predict(self, model: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """The model's prediction, (N, C, h, w), of noisy latents of this shape at timesteps (N,)."""
        channels, (height, width) = noisy.shape[1], noisy.shape[2:]
        grid = (height // self.pack, width // self.pack)
        times = timesteps if self.time_divisor == 1.0 else timesteps / self.time_divisor
        arguments = self.arguments(conditioning, grid)
        given = noisy if self.pack == 1 else pack(noisy, self.pack)
        (output,) = model(given, timestep=1 - times if self.time_reversed else times, return_dict=False, **arguments)
        prediction = output if self.pack == 1 else unpack(output, self.pack, grid)
        prediction = prediction[:, :channels] if self.further_channels else prediction
        return -prediction if self.output_negated else prediction

    def arguments(self, conditioning: Conditioning, grid: tuple[int, int]) -> dict[str, Any]:
        """Keyword arguments beside latents and timesteps; of `a.b`, a dict `a`."""
        given = Given(conditioning, grid, {})
        for name, item in self.inputs.items():
            given = replace(given, made=given.made | item.arguments(name, given))
        arguments: dict[str, Any] = {}
        for name, value in given.made.items():
            outer, _, inner = name.partition(".")
            if inner:
                arguments.setdefault(outer, {})[inner] = value
            else:
                arguments[name] = value
        return arguments


def pack(latents: Tensor, side: int) -> Tensor:
    """(N, C, h, w) → (N, h/side · w/side, C · side²): patches row by row, in each its channels first."""
    n, channels, height, width = latents.shape
    # (N, C, rows, side, columns, side) => (N, rows, columns, C, side, side)
    patches = latents.view(n, channels, height // side, side, width // side, side).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(n, (height // side) * (width // side), channels * side**2)


def unpack(packed: Tensor, side: int, grid: tuple[int, int]) -> Tensor:
    """The inverse of `pack`, of patches in a grid of (rows, columns)."""
    n, _, numbers = packed.shape
    # (N, rows, columns, C, side, side) => (N, C, rows, side, columns, side)
    patches = packed.view(n, *grid, numbers // side**2, side, side).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(n, numbers // side**2, grid[0] * side, grid[1] * side)


def example(texts: dict[str, TextTower], target: tuple[int, int]) -> Conditioning:
    """Conditioning of one sample, of the shapes that these towers give, on the current default device."""
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


def _check_towers(config: BackboneConfig, texts: dict[str, TextTower]) -> None:
    wrong = [
        f"it reads the text tower {name}, and the latents have {', '.join(texts) or 'none'}"
        for name in config.text_towers
        if name not in texts
    ]
    for argument, item in config.inputs.items():
        for name in item.names if isinstance(item, States | Pooled) else ():
            if isinstance(item, States) and name in texts and not texts[name].states:
                wrong.append(f"{argument} is made of {name}'s hidden states, of which the latents hold none")
            if isinstance(item, Pooled) and name in texts and not texts[name].pooled:
                wrong.append(f"{argument} is made of {name}'s pooled output, of which the latents hold none")
    for row in config.states.towers or [] if not wrong else []:
        lengths = {name: (texts[name].length, texts[name].hides_padding) for name in row}
        if len(set(lengths.values())) > 1:
            wrong.append(f"{' and '.join(row)} would stand side by side, of {lengths} (tokens, whether padding hides)")
    if wrong:
        raise RequestError(
            f"The backbone's inputs do not fit the latents: {'; '.join(wrong)}. Encode a root that has them, or mend "
            f"`backbone.inputs` (and data.towers, which says what is read)."
        )


def _rounded(a: Tensor, b: Tensor) -> Tensor:
    """a / b to the nearest whole number, halves up."""
    return (2 * a + b) // (2 * b)


def _beside(parts: Iterable[Tensor | None]) -> Tensor:
    found = [part for part in parts if part is not None]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _behind(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
