"""A frozen network on a device, in reduced precision, with copies to and from the device that overlap its computation.

Every batch is padded to the same size. Because kernels are chosen by shape, this makes a sample's latents independent
of how many other samples share its batch.

Encoding is split into two steps, so that the device never waits for the worker: `start` submits a batch and returns
immediately, and the function that it returns waits for the latents. On a CPU, `start` does all of the work.
"""

import copy
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn

from shards.base.device import Precision, device_module, host_buffer, is_accelerator
from shards.format.buckets import Bucket

Item = TypeVar("Item")
Model = TypeVar("Model", bound=nn.Module)
MAX_SHAPES = 64
"""Maximum number of shapes for which one network is compiled. The limit is high because an aspect table has many
buckets."""


def model_class(name: str) -> Any:
    """Return a transformers class or, for MODULE.CLASS, a class defined in diffusers.pipelines.MODULE. Raises
    AttributeError or ImportError if it does not exist."""
    module, _, class_name = name.rpartition(".")
    namespace = importlib.import_module(f"diffusers.pipelines.{module}") if module else transformers
    return getattr(namespace, class_name)


def vision_options(model: nn.Module) -> dict[str, bool]:
    """Return the call options that let a transformers vision model accept image sizes other than its training size."""
    has_option = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
    return {"interpolate_pos_encoding": True} if has_option else {}


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the autocast context for a precision; it is disabled for float32."""
    dtype = getattr(torch, precision)
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "float32")


def lowered(model: Model, precision: Precision) -> Model:
    """Convert the weights of convolutions and linear layers to `precision`, and return the model.

    Otherwise, autocast would cast these weights again for every batch. The model is changed in place, except with
    float16, where a copy is changed because samples that overflow also need the float32 weights. (bfloat16 has
    float32's range.)
    """
    if precision == "float32":
        return model
    if precision == "float16":
        model = copy.deepcopy(model, {id(buffer): buffer for buffer in model.buffers()})  # buffers never change
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.to(getattr(torch, precision))
    return model


def pad(items: list[Item], batch_size: int) -> list[Item]:
    """Pad a list to `batch_size` items by repeating the last item."""
    return items + items[-1:] * (batch_size - len(items))


def pad_rows(rows: Tensor, batch_size: int) -> Tensor:
    """Pad a tensor to `batch_size` rows by repeating the last row."""
    return torch.cat([rows, rows[-1:].expand(batch_size - len(rows), *rows.shape[1:])])


class DeviceCopies:
    """Copies to and from a GPU that overlap its computation, with one stream per direction and page-locked host memory.

    The allocators never reuse a buffer while a stream still needs it: the host allocator knows which streams copy, and
    the device allocator is informed by `record_stream`. On the CPU there is nothing to copy.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.is_accelerator = is_accelerator(device)
        if self.is_accelerator:
            self.inward, self.outward = device_module().Stream(device), device_module().Stream(device)

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate uninitialised host memory from which `to_device` can copy without blocking."""
        return host_buffer(shape, dtype, self.device)

    def to_device(self, host: Tensor) -> Tensor:
        """Start copying `host` to the device, and return the copy. Kernels that this thread queues afterwards wait on
        the device until the copy is complete."""
        if not self.is_accelerator:
            return host
        compute = device_module().current_stream(self.device)
        with device_module().stream(self.inward):
            copied = host.to(self.device, non_blocking=True)
        compute.wait_stream(self.inward)
        copied.record_stream(compute)
        return copied

    def to_host(self, *results: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Start copying `results` to the host once the kernels queued so far are done. The returned function waits for
        the copies, and returns them."""
        if not self.is_accelerator:
            return lambda: results
        self.outward.wait_stream(device_module().current_stream(self.device))
        with device_module().stream(self.outward):
            copies = tuple(self.buffer(tuple(result.shape), result.dtype) for result in results)
            for result, copied in zip(results, copies, strict=True):
                copied.copy_(result, non_blocking=True)
                result.record_stream(self.outward)
            done = device_module().Event(blocking=True)  # a busy wait would take a core from the decoders
            done.record()

        def wait() -> tuple[Tensor, ...]:
            done.synchronize()
            return copies

        return wait


class Offload:
    """A device that holds the weights of one network at a time, while the other networks stay in host memory.

    Weights do not change, so nothing is copied back. Memory released by one network can be used immediately by the next
    one, because the kernels of all networks, from all threads, are queued on one stream.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.lock = threading.RLock()
        self.on_host: dict[nn.Module, dict[str, Tensor]] = {}
        """Network → its weights and buffers in host memory."""
        self.on_device: nn.Module | None = None

    def add(self, model: nn.Module) -> None:
        """Register a network whose weights are in host memory."""
        both = (model.named_parameters, model.named_buffers)
        self.on_host[model] = {name: tensor for named in both for name, tensor in named(remove_duplicate=False)}

    @contextmanager
    def loaded(self, model: nn.Module) -> Iterator[None]:
        """Keep `model` on the device for the duration of the block, in which its kernels are queued."""
        with self.lock:
            if self.on_device is not model:
                if self.on_device is not None:
                    set_tensors(self.on_device, self.on_host[self.on_device])
                self.on_device = None
                set_tensors(model, self._moved(self.on_host[model]))
                self.on_device = model
            yield

    @torch.inference_mode(False)
    def _moved(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        moved: dict[int, Tensor] = {}
        for tensor in tensors.values():
            if id(tensor) not in moved:  # tied weights have several names
                there = to_device(tensor, self.device)
                is_weight = isinstance(tensor, nn.Parameter)
                moved[id(tensor)] = nn.Parameter(there, requires_grad=False) if is_weight else there
        return {name: moved[id(tensor)] for name, tensor in tensors.items()}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device; a no-op if it is there already."""
    return tensor.to(device)


def set_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Replace weights and buffers of `model` by name."""
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, tensor)


@dataclass(frozen=True)
class DeviceSettings:
    """Device and execution settings of a network."""

    device: torch.device
    precision: Precision
    """Precision of convolutions and matrix products."""
    compiled: bool = False
    """Whether the network is compiled, once per shape. The retry in float32, after float16, is never compiled."""
    offload: Offload | None = None
    """Offload that moves the network to the device when it runs; None keeps the network on the device."""


class Network:
    """A frozen network in the job's precision. With float16, its float32 weights are kept for samples that overflow."""

    def __init__(
        self, model: nn.Module, compute: Callable[..., tuple[Tensor, ...]], settings: DeviceSettings, part: str = ""
    ):
        """
        Args:
            model: the network in float32 on the CPU; it may be changed.
            compute: function that takes the network and a batch's inputs on the device, and returns the results, each a
                (batch, …) float tensor.
            part: submodule to compile; empty for the whole network.
        """
        self.model = model.eval().requires_grad_(False)
        self.device, self.precision, self.offload = settings.device, settings.precision, settings.offload
        if self.offload is None and self.precision == "float16":
            self.model.to(self.device)  # first, so that the copy does not take host memory
        self.lowered = lowered(self.model, self.precision)
        for held in {self.model, self.lowered}:
            if self.offload is None:
                held.to(self.device)
            else:
                self.offload.add(held)
        if settings.compiled:
            # beyond the limit, torch would silently run further shapes uncompiled
            torch._dynamo.config.recompile_limit = MAX_SHAPES
            self.lowered.get_submodule(part).compile(dynamic=False)
        # otherwise float32 convolutions would round their inputs to 10 bits of mantissa
        torch.backends.cudnn.allow_tf32 = False
        self.compute = compute
        self.copies = DeviceCopies(self.device)
        self.warm: set[Bucket | None] = set()
        """Buckets for which the network has been warmed up; None stands for captions."""

    @torch.inference_mode()
    def start(self, inputs: tuple[Tensor, ...], count: int) -> Callable[[], tuple[Tensor, ...]]:
        """Start encoding a batch of inputs in host memory; rows after the first `count` are padding.

        Returns:
            A function that waits for the results, each (count, …) float16 on the CPU. Values may be infinite; with
            `precision: float16`, such rows are encoded again in float32 first.
        """
        results = self._run([self.copies.to_device(host) for host in inputs], self.precision)
        halves = [result[:count].half() for result in results]
        # the sum is finite if and only if every term is: float32 can hold the sum of millions of float16 maxima
        finite = [half.flatten(1).sum(dim=1, dtype=torch.float32).isfinite() for half in halves]
        wait = self.copies.to_host(*halves, torch.stack(finite).all(dim=0))

        @torch.inference_mode()
        def wait_and_repair() -> tuple[Tensor, ...]:
            *stored, finite = wait()
            if self.precision == "float16" and not finite.all():
                batch = len(inputs[0])
                rows = [pad_rows(host[:count][~finite], batch).to(self.device) for host in inputs]
                for half, again in zip(stored, self._run(rows, "float32"), strict=True):
                    half[~finite] = again[: int((~finite).sum())].half().cpu()
            return tuple(stored)

        return wait_and_repair

    def _run(self, inputs: list[Tensor], precision: Precision) -> tuple[Tensor, ...]:
        model = self.lowered if precision == self.precision else self.model
        with self.offload.loaded(model) if self.offload else nullcontext(), autocast(self.device, precision):
            return tuple(result.float() for result in self.compute(model, *inputs))
