"""REPA: aligning a hidden layer of the network with stored image features (Yu et al., 2024, arXiv:2410.06940).

A forward hook captures the layer's output, so any module of any diffusers class can be aligned without changing its
code, and the weights keep their names. An export contains none of it.
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
class StoredFeatures:
    """The stored features of one tower, as a batch holds them."""

    name: str
    tower: FeatureTower
    downsampling: int
    """Image side / latent side."""

    def read(self, batch: Batch, grid: tuple[int, int]) -> Tensor:
        """Return the batch's features, (N, h·w, width) float32, resized to a layer's grid (h, w)."""
        stored, scales = (batch.columns.get(f"{kind}.{self.name}") for kind in ("features", "feature_scales"))
        assert stored is not None
        features = stored.float() if scales is None else dequantise(stored, scales)
        height, width = (side * self.downsampling for side in batch.columns["image_latents"].shape[2:])
        return resized(features, self.tower.grid(Bucket(width, height)), grid)


def find_features(config: RepaConfig, spec: DataSpec, stored: list[str]) -> StoredFeatures:
    """Return the feature tower to align with.

    Args:
        stored: names of all feature towers of the root.

    Raises:
        RequestError: the root has no such tower, the run does not read it, or it reads several and none is named.
    """
    read = sorted(spec.features)
    if config.tower is None and len(read) != 1:
        raise RequestError(
            f"repa.layer needs one feature tower, but data.towers reads {' and '.join(read) or 'none'}. Set "
            f"repa.tower to one of them (the root has {', '.join(stored) or 'none'})."
        )
    name = config.tower or read[0]
    if name not in stored:
        near = difflib.get_close_matches(name, stored, n=1)
        raise RequestError(
            f"repa.tower {name} is not a feature tower of the root{f' (did you mean {near[0]}?)' if near else ''}, "
            f"which has {', '.join(stored) or 'none'}. Set repa.tower to one of these, or encode a root with this "
            f"tower (`features` of stage 1)."
        )
    if name not in read:
        raise RequestError(
            f"repa.tower {name} is in the root, but data.towers does not read it. Add features.{name} to data.towers."
        )
    return StoredFeatures(name, spec.features[name], spec.image.downsampling)


def resized(features: Tensor, grid: tuple[int, int], to: tuple[int, int]) -> Tensor:
    """Resize features (N, h·w, width) from one grid (h, w) to another, bilinearly and antialiased."""
    if grid == to:
        return features
    planes = features.transpose(1, 2).unflatten(2, grid)
    planes = F.interpolate(planes, size=to, mode="bilinear", align_corners=False, antialias=True)
    return planes.flatten(2).transpose(1, 2)


def negative_cosine(projected: Tensor, features: Tensor) -> Tensor:
    """Return the negative mean over patches of the cosine similarity, (N,) float32 (equation 8 of the paper).

    Both arguments are (N, patches, width).
    """
    return -F.cosine_similarity(projected.float(), features.float(), dim=-1).mean(dim=1)


def as_tokens(output: Tensor) -> Tensor:
    """Return a layer's output as (N, tokens, width), converting it from (N, C, h, w) if necessary."""
    return output.flatten(2).transpose(1, 2) if output.ndim == 4 else output


def grid_of(num_tokens: int, latent_hw: tuple[int, int]) -> tuple[int, int] | None:
    """Return the grid (h, w) on which tokens cover latents (h, w) evenly, at their aspect ratio; None: no such grid."""
    height, width = latent_hw
    rows = math.isqrt(num_tokens * height // width)
    fits = rows * rows * width == num_tokens * height and rows and num_tokens % rows == 0
    return (rows, num_tokens // rows) if fits else None


class Aligned(nn.Module):
    """A network with its projection head. It has the call signature and the output of the network."""

    def __init__(self, network: nn.Module, head: nn.Module, config: RepaConfig, features: StoredFeatures):
        super().__init__()
        self.network, self.head = network, head
        self.config, self.features = config, features
        self.captured: list[Tensor] = []
        self.is_capturing = False
        assert config.layer is not None
        network.get_submodule(config.layer).register_forward_hook(self._capture)

    def _capture(self, module: nn.Module, inputs: Any, output: Any) -> None:
        # gradient checkpointing runs the hook again in the backward pass
        if self.is_capturing:
            self.captured.append(output if isinstance(output, Tensor) else output[self.config.output])

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the network's output. If gradients are enabled, keep the head's output for `loss`."""
        self.is_capturing = torch.is_grad_enabled()
        answer = self.network(*inputs, **named)
        self.is_capturing = False
        if self.captured:
            self.projected: Tensor = self.head(as_tokens(self.captured.pop()))
            self.captured.clear()
        return answer

    def discard(self) -> None:
        """Free the head's output and its graph, when `loss` will not be called."""
        self.__dict__.pop("projected", None)

    def loss(self, batch: Batch) -> Tensor:
        """Return the alignment losses (N,) of the batch on which the network was called last."""
        height, width = batch.columns["image_latents"].shape[2:]
        projected = self.projected
        del self.projected  # so that the graph is freed after the backward pass
        grid = grid_of(projected.shape[1], (height, width))
        assert grid is not None
        return negative_cosine(projected, self.features.read(batch, grid))


def make_head(
    config: RepaConfig, shapes: dict[tuple[int, int], tuple[int, ...]], width: int, seed: int
) -> nn.Sequential:
    """Build the projection head, layer's width → hidden → hidden → `width`, whose weights depend on `seed` alone.

    Args:
        shapes: latent shape (h, w) → shape of the layer's output for one sample.

    Raises:
        RequestError: the layer's output is not tokens that cover the latents evenly.
    """
    widths = set()
    for hw, shape in shapes.items():
        tokens = math.prod(shape[2:]) if len(shape) == 4 else shape[1] if len(shape) == 3 else 0
        if grid_of(tokens, hw) is None:
            raise RequestError(
                f"repa.layer {config.layer} has an output of shape {shape} for latents {hw[0]}x{hw[1]}. It must be (N, "
                f"tokens, width) or (N, channels, h, w), with tokens that cover the latents evenly. Set repa.layer to "
                f"a different layer, or repa.output to a different output of it."
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
    """Return the shape of the layer's output when `call` runs the network once.

    Raises:
        RequestError: the layer does not exist, is not called exactly once, or has no such output.
    """
    layers = dict(network.named_modules())
    if not config.layer or config.layer not in layers:
        names = [name for name in layers if name.count(".") <= 1 and name]
        near = difflib.get_close_matches(str(config.layer), names, n=5, cutoff=0.3)
        raise RequestError(
            f"repa.layer {config.layer} is not a module of the network. Set it to a module such as "
            f"{', '.join(near or names)}."
        )
    results: list[Any] = []
    handle = layers[config.layer].register_forward_hook(lambda module, inputs, output: results.append(output))
    with torch.no_grad():
        call()
    handle.remove()
    outputs: list[Any] = []
    if results:
        outputs = [results[0]] if isinstance(results[0], Tensor) else list(results[0])
    chosen = outputs[config.output] if config.output < len(outputs) else None
    if len(results) != 1 or not isinstance(chosen, Tensor):
        kinds = ", ".join(type(output).__name__ for output in outputs) or "nothing"
        raise RequestError(
            f"repa.layer {config.layer} is called {len(results)} times per forward pass and returns {kinds}. It must "
            f"be called once, and its output {config.output} must be a tensor. Set repa.layer to a different layer, or "
            f"repa.output to a different output of it."
        )
    return tuple(chosen.shape)
