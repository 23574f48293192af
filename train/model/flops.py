"""FLOPs of a training step, counted on the meta device, and peak FLOP/s of devices, for computing MFU.

MFU is the model FLOPs utilization of Chowdhery et al. (2022): the FLOP/s that the model itself requires at the measured
throughput, divided by the device's peak. Recomputation of activations by gradient checkpointing does not count.

torch is imported inside the functions that need it, so that reading a config stays fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TRAIN_OVER_FORWARD = 3
"""Ratio of a training step's FLOPs to those of its forward pass: for each matrix product in the forward pass, the
backward pass has two. The exact ratio for the SD2 U-Net is 2.98, because some layers need no gradient for their input;
published MFU figures use 3."""

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
    "H200 NVL": 835.0,
    "H200": 989.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
}
"""GPU name, or a distinctive part of it → dense bfloat16 TFLOP/s from NVIDIA's datasheets and architecture papers. The
headline figures there assume sparsity and are twice as high. Values for GeForce cards assume float32 accumulation."""


def count_flops(function: Callable[..., Any], *inputs: torch.Tensor) -> int:
    """Count the FLOPs of one call. A multiply-add counts as 2. On meta tensors, this takes almost no time."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        function(*inputs)
    return counter.get_total_flops()


def training_flops(call: Callable[[], Any]) -> int:
    """Return the FLOPs per image of a training step. `call`: runs the forward pass for one image on the meta device."""
    import torch

    with torch.no_grad():
        return TRAIN_OVER_FORWARD * count_flops(call)


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak in TFLOP/s of the GPU with this device name, or None if it is unknown."""
    words = device_name.replace("-", " ").split()
    if {"Laptop", "D", "Ti", "MIG"} & set(words):  # a different chip with the same name, or a slice of one
        return None
    known = [name for name in PEAK_TFLOPS if all(word in words for word in name.split())]
    return PEAK_TFLOPS[max(known, key=len)] if known else None
