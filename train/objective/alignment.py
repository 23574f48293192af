"""Representation alignment (REPA): a loss between a hidden layer of the network and stored features of the image.

The method is from Yu et al., "Representation Alignment for Generation" (2024, arXiv 2410.06940). A hook reads the
layer's output, so any module of any diffusers class can be aligned. The projection head is trained and checkpointed
with the network, but is not exported.
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
from shards.base.table import counted
from shards.format.buckets import Bucket
from shards.format.text import dequantise
from shards.format.towers import FeatureTower
from train.data.batch import Batch
from train.data.spec import DataSpec
from train.model.blocks import find_blocks, find_module
from train.objective.config import RepaConfig


@dataclass(frozen=True)
class StoredFeatures:
    """The feature tower with which a layer is aligned."""

    name: str
    tower: FeatureTower
    downsampling: int
    """Ratio of an image's side to the side of its latents."""

    def read(self, batch: Batch, grid: tuple[int, int]) -> Tensor:
        """Return the batch's features resized to the layer's `grid` (h, w), as (N, h·w, width) float32."""
        stored, scales = (batch.columns.get(f"{kind}.{self.name}") for kind in ("features", "feature_scales"))
        assert stored is not None
        features = stored.float() if scales is None else dequantise(stored, scales)
        height, width = (side * self.downsampling for side in batch.columns["image_latents"].shape[2:])
        return resize_tokens(features, self.tower.grid(Bucket(width, height)), grid)


def find_features(config: RepaConfig, spec: DataSpec, stored: list[str]) -> StoredFeatures:
    """Return the feature tower named in the config, or the only feature tower that is read if the config names none.

    Args:
        stored: names of all feature towers in the root.

    Raises:
        RequestError: the root has no tower with that name, the tower is not read, or the config names none and the run
            does not read exactly one.
    """
    read = sorted(spec.features)
    if config.tower is None and len(read) != 1:
        raise RequestError(
            f"repa.layer needs one feature tower, but the run reads {' and '.join(read) or 'none'}. Set repa.tower to "
            f"one of the root's feature towers ({', '.join(stored) or 'none'}). If data.towers is set, it must include "
            f"that tower."
        )
    name = config.tower or read[0]
    if name not in stored:
        near = difflib.get_close_matches(name, stored, n=1)
        raise RequestError(
            f"The root has no feature tower {name}{f' (did you mean {near[0]}?)' if near else ''}; it has "
            f"{', '.join(stored) or 'none'}. Set repa.tower to one of these, or encode a root with `features` in stage "
            f"1."
        )
    if name not in read:
        raise RequestError(f"repa.tower is {name}, but data.towers excludes it. Add features.{name} to data.towers.")
    return StoredFeatures(name, spec.features[name], spec.image.downsampling)


def resize_tokens(tokens: Tensor, grid: tuple[int, int], to: tuple[int, int]) -> Tensor:
    """Resize (N, h·w, width) tokens from one grid (h, w) to another, by antialiased bilinear interpolation."""
    if grid == to:
        return tokens
    planes = tokens.transpose(1, 2).unflatten(2, grid)
    planes = F.interpolate(planes, size=to, mode="bilinear", align_corners=False, antialias=True)
    return planes.flatten(2).transpose(1, 2)


def negative_cosine(projected: Tensor, features: Tensor) -> Tensor:
    """Return the negative cosine similarity of (N, patches, width) tensors, averaged over the patches: (N,) float32.

    This is equation 8 of the REPA paper.
    """
    return -F.cosine_similarity(projected.float(), features.float(), dim=-1).mean(dim=1)


def to_tokens(output: Tensor) -> Tensor:
    """Flatten (N, C, h, w) to (N, h·w, C); return (N, tokens, width) unchanged."""
    return output.flatten(2).transpose(1, 2) if output.ndim == 4 else output


def token_grid(num_tokens: int, latent_hw: tuple[int, int]) -> tuple[int, int] | None:
    """Return the grid (h, w) of tokens that has the aspect ratio of the latents (h, w), or None if there is none."""
    height, width = latent_hw
    rows = math.isqrt(num_tokens * height // width)
    fits = rows * rows * width == num_tokens * height and rows and num_tokens % rows == 0
    return (rows, num_tokens // rows) if fits else None


class LayerOutput:
    """Hook on a layer that keeps its outputs while `recording` is set."""

    def __init__(self, layer: nn.Module) -> None:
        self.outputs: list[Any] = []
        self.recording = False
        self.handle = layer.register_forward_hook(self._keep)

    def _keep(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if self.recording:
            self.outputs.append(output)


class Aligned(nn.Module):
    """A network together with its projection head. It is called like the network itself."""

    def __init__(self, network: nn.Module, head: nn.Module, config: RepaConfig, features: StoredFeatures):
        super().__init__()
        self.network, self.head = network, head
        self.config, self.features = config, features
        assert config.layer is not None
        self.layer = LayerOutput(find_module(network, config.layer))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the network's output. If gradients are enabled, also project the aligned layer, for `loss`."""
        # record only here, because gradient checkpointing calls the layer again in the backward pass
        self.layer.recording = torch.is_grad_enabled()
        answer = self.network(*inputs, **named)
        self.layer.recording = False
        if self.layer.outputs:
            output = self.layer.outputs.pop()
            self.layer.outputs.clear()
            hidden = output if isinstance(output, Tensor) else output[self.config.output]
            self.projected: Tensor = self.head(to_tokens(hidden))
        return answer

    def discard(self) -> None:
        """Discard the projection that `loss` would use, and its autograd graph."""
        self.__dict__.pop("projected", None)

    def loss(self, batch: Batch) -> Tensor:
        """Return the alignment losses (N,) for `batch`, on which the network must have been called last."""
        height, width = batch.columns["image_latents"].shape[2:]
        projected = self.projected
        del self.projected  # so that the graph is freed after the backward pass
        grid = token_grid(projected.shape[1], (height, width))
        assert grid is not None
        return negative_cosine(projected, self.features.read(batch, grid))


def make_head(
    config: RepaConfig, shapes: dict[tuple[int, int], tuple[int, ...]], width: int, seed: int
) -> nn.Sequential:
    """Build the projection head, which maps the layer's width to `width` through two hidden layers.

    Its initial weights depend only on `seed`.

    Args:
        shapes: latent shape (h, w) → shape of the layer's output for one sample.

    Raises:
        RequestError: the layer's output does not consist of tokens that cover the latents evenly.
    """
    widths = set()
    for hw, shape in shapes.items():
        tokens = math.prod(shape[2:]) if len(shape) == 4 else shape[1] if len(shape) == 3 else 0
        if token_grid(tokens, hw) is None:
            raise RequestError(
                f"The output of repa.layer {config.layer} has shape {shape} for latents of {hw[0]}x{hw[1]}. Alignment "
                f"needs the shape (N, tokens, width) or (N, channels, h, w), with tokens that cover the latents "
                f"evenly. Choose a different layer, or a different output (repa.output)."
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


def layer_shape(network: nn.Module, config: RepaConfig, call: Callable[[], object]) -> tuple[int, ...]:
    """Return the shape of the aligned layer's output when `call` calls the network.

    Raises:
        RequestError: the layer does not exist, is not called exactly once, or lacks the configured output.
    """
    try:
        layer = LayerOutput(find_module(network, config.layer or ""))
    except LookupError as error:
        raise RequestError(f"repa.layer {error}. Set repa.layer to one of these.") from None
    layer.recording = True
    with torch.no_grad():
        call()
    layer.handle.remove()
    outputs: list[Any] = []
    if layer.outputs:
        first = layer.outputs[0]
        outputs = [first] if isinstance(first, Tensor) else list(first)
    chosen = outputs[config.output] if config.output < len(outputs) else None
    if len(layer.outputs) != 1 or not isinstance(chosen, Tensor):
        kinds = ", ".join(type(output).__name__ for output in outputs) or "nothing"
        raise RequestError(
            f"repa.layer {config.layer} was called {counted(len(layer.outputs), 'time')} and "
            f"returned {kinds}. Alignment needs a layer that is called once and whose output {config.output} is a "
            f"tensor. Choose a different layer, or a different output (repa.output)."
        )
    return tuple(chosen.shape)


def check_whole_block(network: nn.Module, layer: str) -> None:
    """Check that a layer is not inside a block. Otherwise, the block's graph differs between the forward pass, which
    records the layer's output, and the recomputation, which does not.

    Raises:
        RequestError: the layer is inside a block.
    """
    for block in find_blocks(network):
        if layer.startswith(f"{block}."):
            raise RequestError(
                f"repa.layer {layer} is inside the block {block}, which does not work with both `compile` and "
                f"`gradient_checkpointing: true`. Set repa.layer to {block}, or set gradient_checkpointing to false or "
                f"to a number between 0 and 1, or set compile to false."
            )
