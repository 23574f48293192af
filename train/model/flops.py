"""FLOPs in a training step, counted on the meta device, and devices' peak FLOP/s, for computing MFU.

MFU, the model FLOPs utilisation of Chowdhery et al. (2022), is the rate of FLOPs that the model needs, divided by the
device's peak. Activations recomputed by gradient checkpointing do not count.

torch is imported inside the functions that need it, so that reading a config stays fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TRAIN_OVER_FORWARD = 3
"""FLOPs of a training step ÷ those of its forward pass: for each matrix product of the forward pass, the backward pass
has two. The exact ratio of the SD2 U-Net is 2.98, because some layers need no gradient of their input; published
utilisations use 3."""

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
"""GPU name, or a distinctive part of it → dense bfloat16 TFLOP/s from NVIDIA's datasheets and architecture papers,
whose headline figures with sparsity are twice as high. The values for GeForce cards assume float32 accumulation."""


def count_flops(function: Callable[..., Any], *inputs: torch.Tensor) -> int:
    """Return the FLOPs of one call, where a multiply-add counts as 2. On meta tensors the call takes almost no time."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        function(*inputs)
    return counter.get_total_flops()


def training_flops(call: Callable[[], Any]) -> int:
    """Return the FLOPs for one image in a training step, where `call` is the forward pass on the meta device."""
    import torch

    with torch.no_grad():
        return TRAIN_OVER_FORWARD * count_flops(call)


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak in TFLOP/s of the GPU with this device name, or None if it is unknown."""
    words = device_name.replace("-", " ").split()
    if {"Laptop", "MIG"} & set(words):  # a different chip with the same name, or a slice of one
        return None
    known = [name for name in PEAK_TFLOPS if all(word in words for word in name.split())]
    return PEAK_TFLOPS[max(known, key=len)] if known else None
