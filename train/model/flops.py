"""Arithmetic of a training step, counted on the meta device, and what a device could do: together the MFU.

MFU, the model FLOPs utilisation of Chowdhery et al. (2022), is the arithmetic that the model needs over what the device
does at its peak; what gradient checkpointing computes again does not count.

torch is imported inside the functions that need it: reading a config or a root must not cost its import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TRAIN_OVER_FORWARD = 3
"""A training step is 3 × the forward pass: the backward pass makes two products of each layer's one. Counted exactly
it is 2.98 for the SD2 U-Net, where some layers need no gradient of their input; published utilisations use 3."""

PEAK_TFLOPS = {
    "A100": 312.0,  # SXM and PCIe
    "A40": 149.7,
    "A10G": 70.0,
    "A10": 125.0,
    "L4": 121.0,
    "L40S": 362.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,  # SXM; its name ends in "80GB HBM3"
    "H200": 989.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
}
"""Name of a GPU, or the part of it that tells it from others → bf16 TFLOP/s, dense, of NVIDIA's datasheets and
architecture papers; their headline figures with sparsity are twice these. GeForce's are with float32 accumulation."""


def count_flops(function: Callable[..., Any], *inputs: torch.Tensor) -> int:
    """FLOPs of one call by torch's counter, a multiply-add being 2; on meta tensors it costs next to nothing."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        function(*inputs)
    return counter.get_total_flops()


def training_flops(call: Callable[[], Any]) -> int:
    """FLOPs of one image in a training step, of whose forward pass `call` is one on the meta device."""
    import torch

    with torch.no_grad():
        return TRAIN_OVER_FORWARD * count_flops(call)


def peak_tflops(device_name: str) -> float | None:
    """The bf16 peak of a device by its name, as torch.cuda.get_device_name() says it; None where it is not known."""
    words = device_name.replace("-", " ").split()
    if {"Laptop", "MIG"} & set(words):  # other chips under the same names, or a slice of a chip
        return None
    known = [name for name in PEAK_TFLOPS if all(word in words for word in name.split())]
    return PEAK_TFLOPS[max(known, key=len)] if known else None
