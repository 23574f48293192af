"""How a network is called, by its config: which arguments it gets, and the conventions that no signature shows.

torch is imported inside the functions that need it: reading a config or a root must not cost its import.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from shards.base.config import Config
from shards.base.errors import RequestError
from shards.format.towers import TextTower
from train.model.inputs import Conditioning, Given, Input, Pooled, States

if TYPE_CHECKING:
    from torch import Tensor, nn


class PipelineConfig(Config):
    """The diffusers pipeline that an export is."""

    class_name: str = "StableDiffusionPipeline"
    """Of diffusers."""
    towers: list[str] = Field([])
    """The root's text towers that are its text_encoder, text_encoder_2, …; empty: the one that is trained on."""
    scheduler: str | None = None
    """A diffusers scheduler's class; null: a deterministic one over the noise that was trained on."""
    scheduler_settings: dict[str, Any] = Field({})
    """Of that class, such as {shift: 3.0}."""
    settings: dict[str, Any] = Field({})
    """Further arguments of the pipeline, such as {force_zeros_for_empty_prompt: true}."""


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
    size_dropout: float = Field(0.0, ge=0, le=1)
    """Share of samples whose inputs of kind `sizes` are zeros."""
    size_jitter: float = Field(0.0, ge=0)
    """Deviation of the logarithm of a factor, drawn for each sample, by which it is told of a larger original."""
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

    pipeline: PipelineConfig = PipelineConfig()

    @model_validator(mode="after")
    def _check(self) -> BackboneConfig:
        if sum(isinstance(item, States) for item in self.inputs.values()) != 1:
            raise ValueError("inputs must have one of kind `states`, which may be made of several towers")
        return self

    @property
    def called(self) -> BackboneConfig:
        """What of it changes the numbers."""
        return self.model_copy(update={"config": None, "pipeline": PipelineConfig()})

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

    def resolved(self, texts: dict[str, TextTower]) -> BackboneConfig:
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
