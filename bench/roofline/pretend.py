"""A pretended GPU, used for tracing and lowering only.

Without a driver, torch also misjudges the memory format of a convolution's result, so cuDNN's rule replaces its own.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo import device_interface
from torch._prims_common import suggest_memory_format
from torch.utils._triton import has_triton

H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=140 << 30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    L2_cache_size=60 << 20,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    gcnArchName="",
    is_integrated=0,
    clock_rate=1980000,
    memory_clock_rate=3201000,
    memory_bus_width=6144,
    pci_bus_id=0,
    uuid="0",
)
"""Properties of an sm_90 device, as returned by `torch.cuda.get_device_properties`."""
ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_properties": lambda device=None: H200,
    "get_device_capability": lambda device=None: (H200.major, H200.minor),
    "get_device_name": lambda device=None: H200.name,
    "is_bf16_supported": lambda *_, **__: True,
    "synchronize": lambda device=None: None,
    "_lazy_init": lambda: None,
    "is_initialized": lambda: False,
    "set_device": lambda device: None,
    "_exchange_device": lambda device: 0,
    "_maybe_exchange_device": lambda device: 0,
}


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Make torch report one H200 within the context."""
    with ExitStack() as stack:
        for name, answer in ANSWERS.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        interface = device_interface.CudaInterface
        for name in set(ANSWERS) & set(vars(interface)):
            stack.enter_context(patch.object(interface, name, staticmethod(ANSWERS[name])))
        stack.enter_context(patch.dict(device_interface.caching_worker_device_properties, {"cuda": [H200]}))
        stack.enter_context(patch.dict(device_interface.caching_worker_current_devices, {"cuda": 0}))
        stack.callback(has_triton.cache_clear)  # caches its answer from before the GPU was pretended
        has_triton.cache_clear()
        yield


@contextmanager
def cudnn_layouts() -> Iterator[None]:
    """Make results of convolutions channels last if the input or the weight is, as in aten/native/ConvUtils.h."""

    def memory_format(input: Tensor, weight: Tensor, backend: object) -> torch.memory_format:
        formats = (suggest_memory_format(tensor) for tensor in (input, weight))
        return torch.channels_last if torch.channels_last in formats else torch.contiguous_format

    with (
        patch.object(torch._C, "_select_conv_backend", lambda *_, **__: None),
        patch.object(torch._C, "_conv_determine_backend_memory_format", memory_format),
    ):
        yield
