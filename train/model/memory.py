"""GPU memory and operations that a training step needs, estimated without a GPU.

A forward and a backward pass run on fake CPU tensors, which have shapes but no values, and the bytes of all tensors
alive at the same time are recorded. The estimates for thirteen steps measured on a GPU are off by at most 5 %
(docs/evidence/memory.md). CUDA's context, cuDNN's and NCCL's buffers, fragmentation and the projection head of REPA are
not included; `RESERVED` leaves room for them.
"""

import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from shards.base.device import Precision
from shards.format.encoding import EncodingRecord
from train.data.spec import DataSpec
from train.model.backbone import BackboneConfig
from train.model.blocks import find_blocks
from train.model.config import Checkpointing, Sharding
from train.model.fit import dry_call
from train.model.network import compile_network, compiles_by_block
from train.model.norms import use_low_precision_norms
from train.model.recompute import recompute_blocks, recomputed_shares

GIB = 2**30
RESERVED = 0.08
"""Share of a GPU's memory that is left for everything that the estimate does not include."""
ALLOCATION = 512
"""Granularity in bytes of torch's allocator on GPUs."""
COMPILER_SETTINGS = ("recompile_limit", "accumulated_recompile_limit", "skip_nnmodule_hook_guards")
PARTITIONED = "aot_eager_decomp_partition"
"""torch.compile backend that decides like Inductor which activations to save, but generates no kernels."""
LATENTS_PER_SAMPLE = 5
"""Float32 tensors with the shape of the latents: latents, noise, noise for the posterior, noisy latents, target."""


@dataclass(frozen=True)
class StepSettings:
    """The settings of a run that determine how much memory a step needs."""

    precision: Precision
    microbatch_size: int
    images: int
    """Number of images per process and step."""
    optimizer_bytes: int
    """Bytes of optimizer state per trained parameter."""
    num_averages: int
    """Number of moving averages of the weights."""
    compile: bool = False
    gradient_checkpointing: Checkpointing = False
    low_precision_norms: bool = False
    sharding: Sharding = "none"
    num_processes: int = 1
    """Number of processes across which the weights are sharded."""


@dataclass(frozen=True)
class StepMemory:
    """Estimated bytes on each GPU at the peak of a step."""

    weights: int
    gradients: int
    optimizer: int
    averages: int
    batch: int
    """The process's share of a global batch."""
    activations: int
    """Everything that exists only during a forward and a backward pass, including copies of weights in a lower
    precision."""
    flops: int
    """FLOPs of matrix products, convolutions and attention for one image, including recomputation. A multiply-add
    counts as 2."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.averages + self.batch + self.activations

    def __str__(self) -> str:
        state = self.weights + self.gradients + self.optimizer
        parts = {"weights, gradients and optimizer": state, "moving averages": self.averages, "batch": self.batch}
        shown = [f"{name} {size / GIB:.1f}" for name, size in parts.items() if size]
        return f"{self.total / GIB:.1f} GiB ({', '.join(shown)}, activations {self.activations / GIB:.1f})"


def step_memory(
    network: Any,
    backbone: BackboneConfig,
    data: DataSpec | EncodingRecord,
    latent_hw: tuple[int, int],
    settings: StepSettings,
) -> StepMemory:
    """Estimate the memory of a step. This takes seconds, or about a minute for a compiled U-Net.

    Args:
        network: any network with the architecture and the trained parameters of the run's.
        latent_hw: (height, width) of the latents.
    """
    shards = settings.num_processes if is_sharded(settings) else 1
    count = sum(parameter.numel() for parameter in network.parameters())
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    latents = LATENTS_PER_SAMPLE * 4 * data.image.channels * latent_hw[0] * latent_hw[1]
    texts = sum(
        tower.length * tower.width * tower.states * (1 if tower.storage == "float8" else 2) + 2 * tower.pooled
        for tower in data.texts.values()
    )
    traced = trace_passes(network, backbone, data, latent_hw, settings)
    return StepMemory(
        weights=4 * count // shards,
        gradients=4 * trained // shards,
        optimizer=settings.optimizer_bytes * trained // shards,
        averages=4 * count * settings.num_averages // shards,
        batch=settings.images * (latents + texts),
        activations=traced.peak + gathered_bytes(network, settings),
        flops=traced.flops // settings.microbatch_size,
    )


def is_sharded(settings: StepSettings) -> bool:
    """Return whether the weights are sharded."""
    return settings.sharding != "none" and settings.num_processes > 1


def gathered_bytes(network: nn.Module, settings: StepSettings) -> int:
    """Return the bytes that FSDP needs to gather weights and to average gradients, block by block.

    With `full`, these are the weights outside all blocks, and four copies of the largest block's (in use, gathered in
    advance, and buffers); with `grad_op`, all weights and one buffer. A block's gradients are averaged in float32. On
    two gloo processes, the estimate is at most 30 % too high (tests/train/model/test_memory.py).
    """
    if not is_sharded(settings):
        return 0
    count = sum(parameter.numel() for parameter in network.parameters())
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in find_blocks(network).values()]
    others, largest = count - sum(blocks), max(blocks)
    element = 2 if settings.precision == "bfloat16" else 4
    if settings.sharding == "full":
        return element * others + (4 * element + 4) * largest
    return element * count + (element + 4) * largest


def trace_passes(
    network: Any,
    backbone: BackboneConfig,
    data: DataSpec | EncodingRecord,
    latent_hw: tuple[int, int],
    settings: StepSettings,
) -> "Recorder":
    """Record the FLOPs of a forward and a backward pass of one microbatch, and the peak of the bytes that they
    allocate."""
    with torch.random.fork_rng(devices=[]), compiler_settings():
        copy: Any
        copy, call = dry_call(network, backbone, data, latent_hw, settings.microbatch_size, "cpu")
        for own, its in zip(copy.parameters(), network.parameters(), strict=True):
            own.requires_grad_(its.requires_grad)
        of_blocks, of_activations = recomputed_shares(settings.gradient_checkpointing, settings.compile)
        if of_blocks:
            recompute_blocks(copy, of_blocks)
        if settings.low_precision_norms:
            use_low_precision_norms(copy)
        recorder = Recorder()
        with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            # FSDP gathers weights in bfloat16, and averages the gradients of each block as soon as they exist
            gathers_bfloat16 = is_sharded(settings) and settings.precision == "bfloat16"
            without_values(copy, torch.bfloat16 if gathers_bfloat16 else torch.float32)
            held = list(copy.parameters()) + list(copy.buffers())
            trained = [parameter for parameter in copy.parameters() if parameter.requires_grad]
            for parameter in trained:
                if is_sharded(settings):
                    parameter.register_post_accumulate_grad_hook(lambda averaged: setattr(averaged, "grad", None))
                else:
                    parameter.grad = torch.empty_like(parameter)
                    held.append(parameter.grad)
            if settings.compile:
                compile_network(
                    copy,
                    1,
                    by_block=compiles_by_block(copy, is_sharded(settings)),
                    recomputed=of_activations,
                    backend=PARTITIONED,
                )
                run_passes(call, settings.precision)  # compiles
            recorder.ignore(held)
            with recorder:
                run_passes(call, settings.precision)
    return recorder


@contextmanager
def compiler_settings() -> Iterator[None]:
    """On exit, forget everything that was compiled, and restore the settings that `compile_network` changes."""
    dynamo, functorch = torch._dynamo.config, torch._functorch.config
    unchanged = {name: getattr(dynamo, name) for name in COMPILER_SETTINGS}
    try:
        with dynamo.patch(unchanged), functorch.patch(activation_memory_budget=functorch.activation_memory_budget):
            yield
    finally:
        torch.compiler.reset()


def run_passes(call: Any, precision: Precision) -> None:
    """Run a forward and a backward pass. As in `TrainStep`, casts of weights are kept until both are done."""
    with torch.autocast("cpu", enabled=False):
        with torch.autocast("cpu", getattr(torch, precision), enabled=precision != "float32"):
            prediction = call()
        prediction.float().square().mean().backward()


class Recorder(TorchDispatchMode):
    """Recorder of the total bytes of live tensors created within the context, of their maximum, and of FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.flops = 0
        self._known: dict[int, weakref.ref[Any] | None] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled networks also run compiled within this context."""
        return True

    def ignore(self, tensors: list[Any]) -> None:
        """Do not count these tensors, even if an operation returns them."""
        self._known |= {tensor.untyped_storage()._cdata: None for tensor in tensors}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if count := flop_registry.get(function.overloadpacket):
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // ALLOCATION) * ALLOCATION
        if key in self._known:
            return

        def freed(_: object) -> None:
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


class InFloat32(nn.Module):
    """Mixin that runs a norm in float32, as autocast does on a GPU. CPU autocast does not."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize in float32."""
        with torch.autocast("cpu", enabled=False):
            return super().forward(input.float())


NORMS: list[type[nn.Module]] = [nn.GroupNorm, nn.LayerNorm]
if torch.__version__ >= "2.12":  # 2.15 runs it in float32, 2.11 does not
    NORMS.append(nn.RMSNorm)
FLOAT32: dict[type[nn.Module], type[nn.Module]] = {
    kind: type(f"Float32{kind.__name__}", (InFloat32, kind), {}) for kind in NORMS
}


def without_values(network: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Replace a meta-device network's weights with fake CPU tensors of `dtype` with the same strides, in place.

    Also make it normalize in float32, with float32 weights, as a GPU does. Call this under FakeTensorMode."""
    for module in network.modules():
        module.__class__ = FLOAT32.get(type(module), type(module))
        own = torch.float32 if isinstance(module, InFloat32) else dtype
        for name, weight in module._parameters.items():
            if weight is not None:
                fake = torch.empty_strided(weight.shape, weight.stride(), dtype=own, device="cpu")
                module._parameters[name] = nn.Parameter(fake, weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_strided(
                    buffer.shape, buffer.stride(), dtype=buffer.dtype, device="cpu"
                )


def largest_microbatch(estimates: Mapping[int, StepMemory], capacity: int) -> int:
    """Return the largest microbatch size with which a step fits on a GPU, or 0 if none does.

    The memory is interpolated linearly. This is an upper bound unless torch chooses what to recompute, because the
    peak is otherwise convex in the size. Beyond the largest size, it is extrapolated.

    Args:
        estimates: microbatch size → memory, for two or more sizes.
        capacity: the GPU's memory in bytes.
    """
    found = 0
    for size, following in pairwise(sorted(estimates)):
        low, high = estimates[size].total, estimates[following].total
        if low > usable(capacity):
            break
        found = size + math.floor((following - size) * (usable(capacity) - low) / max(high - low, 1))
        if found < following:
            break
    return found


def usable(capacity: int) -> float:
    """Return the bytes of a GPU's memory that a step may use."""
    return (1 - RESERVED) * capacity
