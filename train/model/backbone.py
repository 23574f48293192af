"""How a network is called: its arguments, and conventions that its signature does not show, such as time scaling.

torch is not imported at run time, so that reading a config stays fast.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from shards.base.config import Config
from shards.base.errors import RequestError
from shards.format.towers import TextTower
from train.model.inputs import Conditioning, Input, InputContext, Pooled, States

if TYPE_CHECKING:
    from torch import Tensor, nn


class PipelineConfig(Config):
    """The diffusers pipeline to export."""

    class_name: str = "StableDiffusionPipeline"
    """Class of the pipeline in diffusers."""
    towers: list[str] = Field([])
    """The root's text towers to export as text_encoder, text_encoder_2, …; empty: the only tower used in training."""
    scheduler: str | None = None
    """Class of the diffusers scheduler; null: a deterministic scheduler with the training noise schedule."""
    scheduler_settings: dict[str, Any] = Field({})
    """Arguments of the scheduler, such as {shift: 3.0}."""
    settings: dict[str, Any] = Field({})
    """Additional arguments of the pipeline, such as {force_zeros_for_empty_prompt: true}."""


class BackboneConfig(Config):
    """The network to train, and how it is called. train/model/backbones.yaml lists the supported diffusers classes."""

    config: Path | None = None
    """A diffusers config (JSON). Its `_class_name` is the network's class, by default UNet2DConditionModel."""
    inputs: dict[str, Input] = Field({"encoder_hidden_states": States(mask="encoder_attention_mask")}, min_length=1)
    """Content of each network argument, other than latents and timesteps. `a.b` is entry b of a dict argument a."""
    drop: Literal["together", "apart"] = "together"
    """Whether caption dropout drops all text towers together, or each independently (Esser et al., 2024)."""
    dropped: Literal["empty", "zeros"] = "empty"
    """Replacement for the text latents of a dropped caption: the latents of the empty caption, or zeros."""
    size_dropout: float = Field(0.0, ge=0, le=1)
    """Share of samples whose inputs of kind `sizes` are replaced by zeros."""
    size_jitter: float = Field(0.0, ge=0)
    """Standard deviation of the logarithm of a random factor that scales each original size in inputs of kind
    `sizes`."""
    pack: int = Field(1, ge=1)
    """Side of the patches into which latents are packed for the network, which takes and returns
    (N, h/pack · w/pack, C · pack²); 1: latents are not packed."""
    time_divisor: float = Field(1.0, gt=0)
    """The network receives timestep / time_divisor."""
    time_reversed: bool = False
    """The network receives 1 − timestep / time_divisor instead."""
    output_negated: bool = False
    """The network predicts the negative of the target."""
    further_channels: bool = False
    """The network has more output channels than the prediction, such as a variance; they are ignored."""

    pipeline: PipelineConfig = PipelineConfig()

    @model_validator(mode="after")
    def _check(self) -> BackboneConfig:
        if sum(isinstance(item, States) for item in self.inputs.values()) != 1:
            raise ValueError("inputs must contain exactly one input of kind `states`, which may use several towers")
        return self

    @property
    def called(self) -> BackboneConfig:
        """A copy of this config, for the fingerprint, without the fields that do not affect the loss."""
        return self.model_copy(update={"config": None, "pipeline": PipelineConfig()})

    @property
    def states(self) -> States:
        """The input that receives hidden states."""
        return next(item for item in self.inputs.values() if isinstance(item, States))

    @property
    def text_towers(self) -> list[str]:
        """Names of the text towers that the inputs use, without duplicates; empty if the inputs name no tower."""
        named = (item.names for item in self.inputs.values() if isinstance(item, States | Pooled))
        return list(dict.fromkeys(name for names in named for name in names))

    @property
    def top_arguments(self) -> list[str]:
        """Names of the network's keyword arguments, other than latents and timesteps."""
        masks = [self.states.mask] if self.states.mask else []
        return list(dict.fromkeys([*(name.split(".")[0] for name in self.inputs), *masks]))

    def resolved(self, texts: dict[str, TextTower]) -> BackboneConfig:
        """Return this config with its text towers named. If it names none, use the only tower with hidden states.

        Raises:
            RequestError: no tower is named, and `texts` does not have exactly one tower with hidden states; or a named
                tower is missing, or was encoded without the outputs that the inputs use.
        """
        if self.states.towers is not None:
            _check_towers(self, texts)
            summed = any(_is_jointly_projected(texts[name]) for name in self.states.names)
            return self._with_states({"summed": summed})
        found = [name for name, tower in texts.items() if tower.states]
        if len(found) != 1:
            raise RequestError(
                f"backbone.inputs names no text tower, so data.towers must select exactly one with hidden states, but "
                f"it selects {' and '.join(found) or 'none'}. Name one such tower in data.towers, as in "
                f"[texts.{(found or ['NAME'])[0]}], or encode a root that has one."
            )
        named = self._with_states({"towers": [found]})
        _check_towers(named, texts)
        return named

    def _with_states(self, changes: dict[str, Any]) -> BackboneConfig:
        inputs = {
            name: item.model_copy(update=changes) if isinstance(item, States) else item
            for name, item in self.inputs.items()
        }
        return self.model_copy(update={"inputs": inputs})

    def predict(self, model: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the model on noisy latents (N, C, h, w) at timesteps (N,), and return its prediction (N, C, h, w)."""
        channels, (height, width) = noisy.shape[1], noisy.shape[2:]
        grid = (height // self.pack, width // self.pack)
        times = timesteps if self.time_divisor == 1.0 else timesteps / self.time_divisor
        arguments = self.arguments(conditioning, grid)
        latents = noisy if self.pack == 1 else pack(noisy, self.pack)
        (output,) = model(latents, timestep=1 - times if self.time_reversed else times, return_dict=False, **arguments)
        prediction = output if self.pack == 1 else unpack(output, self.pack, grid)
        prediction = prediction[:, :channels] if self.further_channels else prediction
        return -prediction if self.output_negated else prediction

    def arguments(self, conditioning: Conditioning, grid: tuple[int, int]) -> dict[str, Any]:
        """Return the network's keyword arguments, other than latents and timesteps.

        Inputs named `a.b` and `a.c` become entries b and c of one dict argument `a`.

        Args:
            grid: number of rows and columns of the latents' patches.
        """
        context = InputContext(conditioning, grid, {})
        for name, item in self.inputs.items():
            context = replace(context, made=context.made | item.arguments(name, context))
        arguments: dict[str, Any] = {}
        for name, value in context.made.items():
            outer, _, inner = name.partition(".")
            if inner:
                arguments.setdefault(outer, {})[inner] = value
            else:
                arguments[name] = value
        return arguments


def pack(latents: Tensor, side: int) -> Tensor:
    """Pack latents (N, C, h, w) into patches, row by row and channels first: (N, h/side · w/side, C · side²)."""
    n, channels, height, width = latents.shape
    # (N, C, rows, side, columns, side) => (N, rows, columns, C, side, side)
    patches = latents.view(n, channels, height // side, side, width // side, side).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(n, (height // side) * (width // side), channels * side**2)


def unpack(packed: Tensor, side: int, grid: tuple[int, int]) -> Tensor:
    """Invert `pack`. `grid`: number of rows and columns of patches."""
    n, _, numbers = packed.shape
    # (N, rows, columns, C, side, side) => (N, C, rows, side, columns, side)
    patches = packed.view(n, *grid, numbers // side**2, side, side).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(n, numbers // side**2, grid[0] * side, grid[1] * side)


def _check_towers(config: BackboneConfig, texts: dict[str, TextTower]) -> None:
    """Check that the text towers have the outputs that the inputs use.

    Raises:
        RequestError: a tower is missing, lacks the states or pooled output that an input uses, or cannot be
            concatenated with a different tower.
    """
    problems = []
    for name in config.text_towers:
        if name not in texts:
            problems.append(f"they use the text tower {name}, but the latents have {', '.join(texts) or 'none'}")
    for argument, item in config.inputs.items():
        names = item.names if isinstance(item, States | Pooled) else []
        for name in names:
            if name not in texts:
                continue  # listed above
            if isinstance(item, States) and not texts[name].states:
                problems.append(f"{argument} uses the hidden states of {name}, which was encoded without them")
            if isinstance(item, Pooled) and not texts[name].pooled:
                problems.append(f"{argument} uses the pooled output of {name}, which was encoded without it")
    if not problems:
        problems = _concatenation_problems(config.states, texts) + _projection_problems(config.states, texts)
    if problems:
        raise RequestError(
            f"The backbone's inputs do not fit the latents: {'; '.join(problems)}. Change `backbone.inputs` or "
            f"data.towers, which selects the towers to read, or encode a root that has the required towers."
        )


def _concatenation_problems(states: States, texts: dict[str, TextTower]) -> list[str]:
    """Describe towers that cannot be concatenated along the width, because they differ in length or masking."""
    problems = []
    for row in states.towers or []:
        tokens = {name: (texts[name].length, texts[name].hides_padding) for name in row}
        if len(set(tokens.values())) > 1:
            problems.append(
                f"{' and '.join(row)} cannot be concatenated along the width, because they differ in (number of "
                f"tokens, masked or trimmed padding): {tokens}"
            )
    return problems


def _is_jointly_projected(tower: TextTower) -> bool:
    return tower.projection is not None and len(tower.projection.joint) > 0


def _projection_problems(states: States, texts: dict[str, TextTower]) -> list[str]:
    """Describe towers that must be projected jointly but are not."""
    projections = [texts[name].projection for name in states.names]
    joint = {projection.joint if projection else () for projection in projections}
    if len(states.lists) == 1 and joint == {()}:
        return []  # concatenated along the width, each tower has its own input columns of the layer
    if not any(projections) or (len(joint) == 1 and set(states.lists) <= set(*joint)):
        return []
    return [
        f"the network reads {' and '.join(states.names)} through one layer, so they must be projected jointly "
        f"(`text.joint: {states.towers}` in stage 1) or not at all"
    ]
