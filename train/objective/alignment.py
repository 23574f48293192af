"""REPA: a hidden layer of the network is aligned with stored features of the picture (Yu et al., 2024, 2410.06940).

The layer is heard by a forward hook: any module of any diffusers class can be named, without a line of its code, and
the network's weights keep their names. Nothing of it is in an export.
"""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shards.base.errors import RequestError
from shards.format.buckets import Bucket
from shards.format.text import dequantise
from shards.format.towers import FeatureTower
from train.data.batch import Batch
from train.data.spec import DataSpec
from train.objective.config import RepaConfig


@dataclass(frozen=True)
class FeaturesOf:
    """The tower that is aligned with, as a batch holds it."""

    name: str
    tower: FeatureTower
    downsampling: int
    """Picture side / latent side."""

    def read(self, batch: Batch, grid: tuple[int, int]) -> Tensor:
        """(N, h·w, width) float32 on a layer's grid (h, w), to which features of another grid are resized."""
        stored, scales = (batch.columns.get(f"{kind}.{self.name}") for kind in ("features", "feature_scales"))
        assert stored is not None
        features = stored.float() if scales is None else dequantise(stored, scales)
        height, width = (side * self.downsampling for side in batch.columns["image_latents"].shape[2:])
        return resized(features, self.tower.grid(Bucket(width, height)), grid)


def find_features(config: RepaConfig, spec: DataSpec, stored: list[str]) -> FeaturesOf:
    """The tower that the config names.

    Args:
        stored: names of all feature towers of the root.

    Raises:
        RequestError: the root has none of that name, it is not read, or several are and none is named.
    """
    read = sorted(spec.features)
    if config.tower is None and len(read) != 1:
        raise RequestError(
            f"repa.layer asks for one feature tower, and {' and '.join(read) or 'none'} would be read. Name one as "
            f"repa.tower (the root has {', '.join(stored) or 'none'})."
        )
    name = config.tower or read[0]
    if name not in stored:
        near = difflib.get_close_matches(name, stored, n=1)
        raise RequestError(
            f"repa.tower {name} is no feature tower of the root{f' (did you mean {near[0]}?)' if near else ''}: it has "
            f"{', '.join(stored) or 'none'}. Name one of these, or encode a root with it (`features` of stage 1)."
        )
    if name not in read:
        raise RequestError(
            f"repa.tower {name} is in the root and would not be read. Add features.{name} to data.towers."
        )
    return FeaturesOf(name, spec.features[name], spec.image.downsampling)


def resized(features: Tensor, grid: tuple[int, int], to: tuple[int, int]) -> Tensor:
    """(N, h·w, width) of tokens on one grid (h, w) → on another: bilinear, and antialiased where it gets coarser."""
    if grid == to:
        return features
    planes = features.transpose(1, 2).unflatten(2, grid)
    planes = F.interpolate(planes, size=to, mode="bilinear", align_corners=False, antialias=True)
    return planes.flatten(2).transpose(1, 2)


def negative_cosine(projected: Tensor, features: Tensor) -> Tensor:
    """(N,) float32: −mean over patches of the cosine of (N, patches, width) with the like, equation 8 of the paper."""
    return -F.cosine_similarity(projected.float(), features.float(), dim=-1).mean(dim=1)


def as_tokens(output: Tensor) -> Tensor:
    """(N, tokens, width) as it is, or of (N, C, h, w)."""
    return output.flatten(2).transpose(1, 2) if output.ndim == 4 else output


def grid_of(num_tokens: int, latent_hw: tuple[int, int]) -> tuple[int, int] | None:
    """(h, w) of so many tokens that cover latents (h, w) evenly, in the same ratio; None: they do not."""
    height, width = latent_hw
    rows = math.isqrt(num_tokens * height // width)
    fits = rows * rows * width == num_tokens * height and rows and num_tokens % rows == 0
    return (rows, num_tokens // rows) if fits else None


class Aligned(nn.Module):
    """A network with its projection head; called as the network is, and answers as it does."""

    def __init__(self, network: nn.Module, head: nn.Module, config: RepaConfig, features: FeaturesOf):
        super().__init__()
        self.network, self.head = network, head
        self.config, self.features = config, features
        self.heard: list[Tensor] = []
        self.listens = False
        assert config.layer is not None
        network.get_submodule(config.layer).register_forward_hook(self._hear)

    def _hear(self, module: nn.Module, inputs: Any, output: Any) -> None:
        # not again where the backward pass computes activations anew
        if self.listens:
            self.heard.append(output if isinstance(output, Tensor) else output[self.config.output])

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The network's own answer; where gradients are asked for, the head's lies ready for `loss`."""
        self.listens = torch.is_grad_enabled()
        answer = self.network(*inputs, **named)
        self.listens = False
        if self.heard:
            self.projected: Tensor = self.head(as_tokens(self.heard.pop()))
            self.heard.clear()
        return answer

    def forget(self) -> None:
        """Drop what lies ready for `loss`, and the graph behind it."""
        self.__dict__.pop("projected", None)

    def loss(self, batch: Batch) -> Tensor:
        """(N,) of the batch that the network was last called with."""
        height, width = batch.columns["image_latents"].shape[2:]
        projected = self.projected
        del self.projected  # the graph is not held longer than the backward pass needs it
        grid = grid_of(projected.shape[1], (height, width))
        assert grid is not None
        return negative_cosine(projected, self.features.read(batch, grid))


def make_head(
    config: RepaConfig, shapes: dict[tuple[int, int], tuple[int, ...]], width: int, seed: int
) -> nn.Sequential:
    """The projection head, of weights that depend on `seed` alone: layer's width → hidden → hidden → `width`.

    Args:
        shapes: latent shape (h, w) → shape of the layer's output for one sample.

    Raises:
        RequestError: its output is not of tokens that cover the latents evenly.
    """
    widths = set()
    for hw, shape in shapes.items():
        tokens = math.prod(shape[2:]) if len(shape) == 4 else shape[1] if len(shape) == 3 else 0
        if grid_of(tokens, hw) is None:
            raise RequestError(
                f"repa.layer {config.layer} gives {shape} of latents {hw[0]}x{hw[1]}. What is aligned must be (N, "
                f"tokens, width) or (N, channels, h, w), with tokens that cover the latents evenly. Name another "
                f"layer, or another of its outputs (repa.output)."
            )
        widths.add(shape[1] if len(shape) == 4 else shape[2])
    (layer_width,) = widths
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(layer_width, config.hidden),
            nn.SiLU(),
            nn.Linear(config.hidden, config.hidden),
            nn.SiLU(),
            nn.Linear(config.hidden, width),
        )


def hear(network: nn.Module, config: RepaConfig, call: Callable[[], object]) -> tuple[int, ...]:
    """Shape of what the layer gives when `call` calls the network.

    Raises:
        RequestError: there is no such layer, it was not called, or has no such output.
    """
    layers = dict(network.named_modules())
    if not config.layer or config.layer not in layers:
        names = [name for name in layers if name.count(".") <= 1 and name]
        near = difflib.get_close_matches(str(config.layer), names, n=5, cutoff=0.3)
        raise RequestError(
            f"repa.layer {config.layer} is no module of the network. Near it are {', '.join(near) or names}. Name one."
        )
    heard: list[Any] = []
    handle = layers[config.layer].register_forward_hook(lambda module, inputs, output: heard.append(output))
    with torch.no_grad():
        call()
    handle.remove()
    outputs = [heard[0]] if heard and isinstance(heard[0], Tensor) else list(heard[0]) if heard else []
    chosen = outputs[config.output] if config.output < len(outputs) else None
    if len(heard) != 1 or not isinstance(chosen, Tensor):
        kinds = ", ".join(type(output).__name__ for output in outputs) or "nothing"
        raise RequestError(
            f"repa.layer {config.layer} was called {len(heard)} times, and gives {kinds}: its output {config.output} "
            f"is no tensor of one call. Name another layer, or another of its outputs (repa.output)."
        )
    return tuple(chosen.shape)
