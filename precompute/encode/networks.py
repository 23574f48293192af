"""A frozen network on a device: in lowered precision, with copies that run beside its arithmetic.

Every batch is filled up to one size: kernels are chosen by shape, and so a sample's latents do not depend on how many
others happened to share its batch.

Encoding is in two halves, so that the device never waits for the worker: `start` hands a batch over and comes back at
once; calling what it returned waits for the latents. On a CPU, `start` does all of it.
"""

import copy
import importlib
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from shards.base.device import Precision, device_module, host_buffer, is_accelerator
from shards.base.errors import UnfitNode
from shards.format.buckets import Bucket
from shards.format.towers import Quantised

Item = TypeVar("Item")
Model = TypeVar("Model", bound=nn.Module)
MOST_SHAPES = 64
"""For which one network is compiled: buckets of an aspect table are many."""


def model_class(name: str) -> Any:
    """A class of transformers; or, by MODULE.CLASS, one that diffusers.pipelines.MODULE makes of it.

    Raises:
        AttributeError, ImportError: there is none.
    """
    module, _, class_name = name.rpartition(".")
    where = importlib.import_module(f"diffusers.pipelines.{module}") if module else transformers
    return getattr(where, class_name)


def vision_options(model: nn.Module) -> dict[str, bool]:
    """What some of transformers' vision models want to be told: a picture may have another size than in training."""
    asked = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
    return {"interpolate_pos_encoding": True} if asked else {}


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Mixed precision as configured; float32 turns it off."""
    dtype = getattr(torch, precision)
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "float32")


def lowered(model: Model, precision: Precision) -> Model:
    """A copy whose products hold their weights in `precision`: what autocast would make of them anew for each batch."""
    if precision == "float32":
        return model
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.to(getattr(torch, precision))
    return model


def quantised(model: Model, to: Quantised) -> Model:
    """The network, in float32, with the weights of its linear layers in int8 or float8; products are taken in the
    precision of their inputs.

    Raises:
        UnfitNode: torchao is not installed here.
    """
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise UnfitNode(
            f"{os.uname().nodename} has no torchao ({error}), which makes a text tower's {to} weights. Install it "
            f"there: pip install 'latentmill[quantised]'."
        ) from error
    quantize_(model, Int8WeightOnlyConfig() if to == "int8" else Float8WeightOnlyConfig())
    return model


def filled(items: list[Item], batch_size: int) -> list[Item]:
    """`items` and as many copies of the last one as make up `batch_size`."""
    return items + items[-1:] * (batch_size - len(items))


def filled_rows(rows: Tensor, batch_size: int) -> Tensor:
    """The same for the rows of a tensor."""
    return torch.cat([rows, rows[-1:].expand(batch_size - len(rows), *rows.shape[1:])])


class Copies:
    """Copies to and from a GPU that run beside its arithmetic: a stream each way, and page-locked memory at this end.

    The allocators see to it that no buffer is handed out again while a stream still uses it: the host's knows which
    streams copy, the device's is told by `record_stream`. On the CPU there is nothing to copy.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.is_accelerator = is_accelerator(device)
        if self.is_accelerator:
            self.inward, self.outward = device_module().Stream(device), device_module().Stream(device)

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory that `to_device` can copy from without stopping this thread."""
        return host_buffer(shape, dtype, self.device)

    def to_device(self, host: Tensor) -> Tensor:
        """Begin to copy `host`; what this thread launches next waits for it on the device."""
        if not self.is_accelerator:
            return host
        arithmetic = device_module().current_stream(self.device)
        with device_module().stream(self.inward):
            copied = host.to(self.device, non_blocking=True)
        arithmetic.wait_stream(self.inward)
        copied.record_stream(arithmetic)
        return copied

    def to_host(self, *results: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Begin to copy `results` once what was launched so far is done; the function returned waits for them."""
        if not self.is_accelerator:
            return lambda: results
        self.outward.wait_stream(device_module().current_stream(self.device))
        with device_module().stream(self.outward):
            copies = tuple(self.buffer(tuple(result.shape), result.dtype) for result in results)
            for result, copied in zip(results, copies, strict=True):
                copied.copy_(result, non_blocking=True)
                result.record_stream(self.outward)
            done = device_module().Event(blocking=True)  # or the wait would take a core from the decoders
            done.record()

        def wait() -> tuple[Tensor, ...]:
            done.synchronize()
            return copies

        return wait


class Offload:
    """A device that has the weights of one network at a time; those of the others wait in the host's memory.

    Weights do not change, so nothing is copied back. What a network leaves is free for the next one at once: all of
    them are launched into one stream, whichever thread does it.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.lock = threading.RLock()
        self.waiting: dict[nn.Module, dict[str, Tensor]] = {}
        """Network → its weights and buffers on the host."""
        self.on_device: nn.Module | None = None

    def add(self, model: nn.Module) -> None:
        """A network, which is on the host."""
        both = (model.named_parameters, model.named_buffers)
        self.waiting[model] = {name: tensor for named in both for name, tensor in named(remove_duplicate=False)}

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """`model` is on the device, and stays there while its work is launched."""
        with self.lock:
            if self.on_device is not model:
                if self.on_device is not None:
                    put(self.on_device, self.waiting[self.on_device])
                self.on_device = None
                put(model, self._moved(self.waiting[model]))
                self.on_device = model
            yield

    @torch.inference_mode(False)
    def _moved(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        moved: dict[int, Tensor] = {}
        for tensor in tensors.values():
            if id(tensor) not in moved:  # some have two names
                there = to_device(tensor, self.device)
                is_weight = isinstance(tensor, nn.Parameter)
                moved[id(tensor)] = nn.Parameter(there, requires_grad=False) if is_weight else there
        return {name: moved[id(tensor)] for name, tensor in tensors.items()}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """On a CPU it is there."""
    return tensor.to(device)


def put(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Have `model` compute with these weights and buffers, by name."""
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, tensor)


@dataclass(frozen=True)
class Site:
    """Where a network runs, and how."""

    device: torch.device
    precision: Precision
    """Of its products."""
    compiled: bool = False
    """For each shape; what is encoded again in float32 is not worth it."""
    offload: Offload | None = None
    """What moves it to the device to run; None: it is always there."""


class Network:
    """A frozen network, held in float32 and with its products lowered."""

    def __init__(self, model: nn.Module, compute: Callable[..., tuple[Tensor, ...]], site: Site, part: str = ""):
        """Args:
        model: in float32, on the CPU.
        compute: (the network, a batch's inputs on the device) → its results, (batch, …) floats each.
        part: of the network, which is compiled; `""` for all of it.
        """
        self.model = model.eval().requires_grad_(False)
        self.device, self.precision, self.offload = site.device, site.precision, site.offload
        if self.offload is None:
            self.model.to(self.device)
        self.lowered = lowered(self.model, self.precision)
        if self.offload is not None:
            for held in {self.model, self.lowered}:
                self.offload.add(held)
        if site.compiled:
            # or further shapes would quietly run as they are
            torch._dynamo.config.recompile_limit = MOST_SHAPES
            self.lowered.get_submodule(part).compile(dynamic=False)
        torch.backends.cudnn.allow_tf32 = False  # of convolutions in float32, which round to ten bits otherwise
        self.compute = compute
        self.copies = Copies(self.device)
        self.warm: set[Bucket | None] = set()
        """What it was warmed up for: buckets; None for captions."""

    def stack(self, pictures: list[np.ndarray], batch_size: int) -> Tensor:
        """Pictures (H, W, 3) uint8 as a full batch, (batch_size, H, W, 3), on the host."""
        pixels = self.copies.buffer((batch_size, *pictures[0].shape), torch.uint8)
        batch: list[np.ndarray] = filled(pictures, batch_size)
        np.stack(batch, out=pixels.numpy())
        return pixels

    @torch.inference_mode()
    def start(self, inputs: tuple[Tensor, ...], count: int) -> Callable[[], tuple[Tensor, ...]]:
        """Begin with a batch's inputs on the host, whose first `count` rows count.

        Returns:
            Waits; the results as float16 on the CPU, (count, …) each. A row of which one overflows float16 is encoded
            again in float32; it may still overflow.
        """
        results = self._run([self.copies.to_device(host) for host in inputs], self.precision)
        halves = [result[:count].half() for result in results]
        # a sum is finite exactly if every term is: float32 holds millions of the largest float16
        finite = [half.flatten(1).sum(dim=1, dtype=torch.float32).isfinite() for half in halves]
        wait = self.copies.to_host(*halves, torch.stack(finite).all(dim=0))

        @torch.inference_mode()
        def waited() -> tuple[Tensor, ...]:
            *stored, finite = wait()
            if self.precision != "float32" and not finite.all():
                batch = len(inputs[0])
                rows = [filled_rows(host[:count][~finite], batch).to(self.device) for host in inputs]
                for half, again in zip(stored, self._run(rows, "float32"), strict=True):
                    half[~finite] = again[: int((~finite).sum())].half().cpu()
            return tuple(stored)

        return waited

    def _run(self, inputs: list[Tensor], precision: Precision) -> tuple[Tensor, ...]:
        model = self.lowered if precision == self.precision else self.model
        with self.offload.of(model) if self.offload else nullcontext(), autocast(self.device, precision):
            return tuple(result.float() for result in self.compute(model, *inputs))
