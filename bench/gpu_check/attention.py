"""Error and speed of torch's attention kernels on the shapes of the U-Net and of the VAE's middle block."""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from torch import Tensor

from bench.gpu_check.findings import Findings
from bench.gpu_check.setup import Setup, seconds_of
from shards.base.device import SAFE_KERNELS, AttentionKernel
from train.model.attention import BACKENDS, Outcome, both_ways, provoke

MAX_ERROR = 0.02
"""Maximum relative RMS error of bfloat16."""


@dataclass(frozen=True)
class AttentionShape:
    """Queries (N, heads, tokens, head_dim), with keys and values of `keys` tokens."""

    name: str
    batch: int
    heads: int
    tokens: int
    keys: int
    head_dim: int


def shapes(setup: Setup) -> list[AttentionShape]:
    """Return the two largest self-attentions of Stable Diffusion 2's U-Net at 512 px, and its cross-attention."""
    if setup.small:
        return [AttentionShape("self", 2, 2, 16, 16, 8), AttentionShape("captions", 2, 2, 16, 7, 8)]
    return [
        AttentionShape("self, 64 × 64", 32, 5, 4096, 4096, 64),
        AttentionShape("self, 32 × 32", 32, 10, 1024, 1024, 64),
        AttentionShape("captions, 64 × 64", 32, 5, 4096, 77, 64),
    ]


def attention(setup: Setup, found: Findings) -> None:
    """Compare the forward and backward passes of each kernel in bfloat16 with plain matrix products in float32.

    A kernel that does not support a shape is listed as such.
    """
    for shape in shapes(setup):
        made = torch.Generator(setup.device).manual_seed(0)
        sizes = [(shape.batch, shape.heads, n, shape.head_dim) for n in (shape.tokens, shape.keys, shape.keys)]
        inputs = [torch.randn(size, generator=made, device=setup.device) for size in sizes]
        few = [tensor[:2] for tensor in inputs]
        exact = both_ways("math", few)
        for kernel in BACKENDS:
            compare(setup, found, shape.name, kernel, inputs, exact)
    middle(setup, found)
    provoked(setup, found)


def provoked(setup: Setup, found: Findings) -> None:
    """Tabulate each kernel's results on the inputs of `train/model/attention.py`, and check those of the kernels that a
    run uses by default."""
    for kernel in BACKENDS:
        for outcome in provoke(setup.device, kernel):
            is_default, not_finite = kernel in SAFE_KERNELS, outcome.not_finite
            found.row(
                "provoked",
                kernel=kernel,
                default=is_default,
                input=outcome.name,
                not_finite=not_finite,
                error=error_in_float64(outcome) if not_finite == 0 else None,
                refusal=outcome.refusal,
            )
            if is_default and not_finite is not None:
                found.check(f"attention, {outcome.name}, {kernel}: values that are not finite", not_finite, 0)


def error_in_float64(outcome: Outcome) -> float:
    """Return the largest relative RMS error of a kernel's output and gradients, compared with float64."""
    exact = both_ways("math", [tensor.double() for tensor in outcome.inputs])
    return max(error_of(result, reference.float()) for result, reference in zip(outcome.results, exact, strict=True))


def error_of(result: Tensor, reference: Tensor) -> float:
    """Return the RMS of the difference over the RMS of the reference."""
    return float((result.float() - reference).norm() / reference.norm())


def compare(
    setup: Setup, found: Findings, shape: str, kernel: AttentionKernel, inputs: list[Tensor], exact: list[Tensor]
) -> None:
    """Check and time one kernel on one shape."""
    lowered = [tensor.to(torch.bfloat16) for tensor in inputs]
    try:
        results = both_ways(kernel, [tensor[:2] for tensor in lowered])
    except RuntimeError as refusal:
        found.row("attention", shape=shape, kernel=kernel, ms=None, note=str(refusal).splitlines()[0][:80])
        return
    error = max(error_of(result, reference) for result, reference in zip(results, exact, strict=True))
    found.check(f"attention {shape}, {kernel}: error of values and gradients", error, MAX_ERROR)
    ms = 1e3 * seconds_of(lambda: both_ways(kernel, lowered), setup)
    found.row("attention", shape=shape, kernel=kernel, ms=round(ms, 3), note="forward and backward")


def middle(setup: Setup, found: Findings) -> None:
    """Compare the attention in the VAE encoder's middle block, as matrix products and as one fused call."""
    channels, tokens, batch = (64, 64, 2) if setup.small else (512, 4096, 32)
    torch.manual_seed(0)
    module: Any = Attention(channels, heads=1, dim_head=channels, bias=True)
    module = module.to(setup.device).requires_grad_(False)
    states = torch.randn(batch, tokens, channels, device=setup.device)
    module.set_processor(AttnProcessor())
    with torch.inference_mode():
        exact = module(states[:2])
        for name, processor in (("plain products", AttnProcessor()), ("one call", AttnProcessor2_0())):
            module.set_processor(processor)
            with torch.autocast(setup.device.type, torch.bfloat16):
                error = error_of(module(states[:2]), exact)
                ms = 1e3 * seconds_of(lambda: module(states), setup)
            found.check(f"attention in the VAE's middle, {name}: error", error, MAX_ERROR)
            found.row("attention", shape="the VAE's middle", kernel=name, ms=round(ms, 3), note="forward")
