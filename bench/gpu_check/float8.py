"""Linear layers that multiply in float8: their values and speed, next to the model that chooses them."""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.gpu_check.findings import Findings
from bench.gpu_check.setup import Setup, seconds_of
from train.model.float8 import float8_problem, large_linears, use_float8

LAYERS = [(8192, 3072, 12288), (8192, 3072, 3072), (4096, 2432, 9728), (4096, 1536, 6144), (4096, 1280, 1280)]
"""Rows, inputs and outputs, from layers of FLUX.1 down to ones for which the model expects no gain."""
TORCHAO = Path(".torchao")
"""Folder into which `make test-float8` and `bench/gpu_check.sh wheels` install torchao."""
MAX_DIFFERENCE = 0.01
"""Maximum difference from emulated products of the same rounded values, relative to the norm of the latter. Tensor
cores accumulate float8 products with 14 bits."""


def missing(setup: Setup) -> str | None:
    """Return why float8 cannot be tried here, or None. torchao is then importable, from `TORCHAO` if necessary."""
    if find_spec("torchao") is None and TORCHAO.is_dir():
        sys.path.append(str(TORCHAO.resolve()))
    if setup.device.type == "cpu" and find_spec("torchao") is not None:
        return None  # a rehearsal emulates it
    return float8_problem(setup.device, "bfloat16")


def layers(setup: Setup, found: Findings) -> None:
    """Compare float8 layers with emulated ones, and time them, compiled, next to bfloat16."""
    if problem := missing(setup):
        found.row("float8", note=f"skipped: {problem}")
        return
    for rows, inputs, outputs in [(32, 64, 48)] if setup.small else LAYERS:
        with found.tried("float8", rows=rows, inputs=inputs, outputs=outputs):
            values = {how: trained_once(setup, (rows, inputs, outputs), how) for how in ("float8", "emulated")}
            for what, value, expected in zip(
                ("output", "input's gradient", "weight's gradient"), *values.values(), strict=True
            ):
                difference = float((value - expected).norm() / expected.norm())
                found.check(f"float8, {rows} x {inputs} x {outputs}: {what}", difference, MAX_DIFFERENCE)
            times = {how: 1e3 * seconds(setup, (rows, inputs, outputs), how) for how in ("bfloat16", "float8")}
            found.row(
                "float8",
                rows=rows,
                inputs=inputs,
                outputs=outputs,
                bfloat16_ms=times["bfloat16"],
                float8_ms=times["float8"],
                times_as_fast=times["bfloat16"] / times["float8"],
                chosen=is_chosen(rows, inputs, outputs),
            )


def is_chosen(rows: int, inputs: int, outputs: int) -> bool:
    """Return whether training would use float8 for such a layer."""
    layer = nn.Sequential(nn.Linear(inputs, outputs, device="meta"))
    return large_linears(layer, lambda: layer(torch.empty(rows, inputs, device="meta")), 1) == ["0"]


def make(setup: Setup, shape: tuple[int, int, int], how: str) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Return a layer in float32, its input and the gradient of its output, both in bfloat16."""
    rows, inputs, outputs = shape
    torch.manual_seed(0)
    with torch.device(setup.device):
        layer = nn.Sequential(nn.Linear(inputs, outputs))
        x, gradient = torch.randn(rows, inputs, dtype=torch.bfloat16), torch.randn(rows, outputs, dtype=torch.bfloat16)
    if how != "bfloat16":
        use_float8(layer, ["0"], emulated=how == "emulated" or setup.device.type == "cpu")
    return layer, x.requires_grad_(), gradient


def trained_once(setup: Setup, shape: tuple[int, int, int], how: str) -> list[Tensor]:
    """Return the output, and the gradients of the input and the weight, in float32."""
    layer, x, gradient = make(setup, shape, how)
    with torch.autocast(setup.device.type, torch.bfloat16):
        output = layer(x)
    output.backward(gradient)
    weight = next(layer.parameters())
    assert x.grad is not None and weight.grad is not None
    return [tensor.detach().float() for tensor in (output, x.grad, weight.grad)]


def seconds(setup: Setup, shape: tuple[int, int, int], how: str) -> float:
    """Return the seconds of a forward and backward pass of the compiled layer."""
    torch.compiler.reset()
    layer, x, gradient = make(setup, shape, how)
    layer.compile()

    def run() -> None:
        with torch.autocast(setup.device.type, torch.bfloat16):
            output = layer(x)
        output.backward(gradient)

    return seconds_of(run, setup)
