"""Error and speed of torch's attention kernels on the shapes of the U-Net and of the VAE's middle block."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu_check.findings import Findings
from bench.gpu_check.setup import Setup, seconds_of
from shards.base.device import choose_attention

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
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
        exact = both_ways(SDPBackend.MATH, few)
        for name, backend in BACKENDS.items():
            compare(setup, found, shape.name, name, backend, inputs, exact)
    middle(setup, found)
    provoke(setup, found)


def provoke(setup: Setup, found: Findings) -> None:
    """Count values that are not finite after the forward and backward passes of inputs that some kernels fail on.

    cuDNN's backward pass returned NaN for 64 keys and rows whose log-sum-exp is below -88.7 (pytorch #196678). Here,
    all logits are close to -120. Only kernels that the trainer allows are checked; the others are listed.
    """
    choose_attention(setup.device)
    allowed = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": True,
    }
    made = torch.Generator(setup.device).manual_seed(0)
    for tokens, keys in ((64, 64), (4096, 64), (64, 192), (77, 77), (64, 77)):
        shape = f"{tokens} tokens, {keys} keys, logits near -120"
        direction = torch.nn.functional.normalize(torch.randn(64, generator=made, device=setup.device), dim=0)
        draw = {n: torch.randn((4, 5, n, 64), generator=made, device=setup.device) for n in {tokens, keys}}
        query, key, value = 31 * direction + 0.1 * draw[tokens], -31 * direction + 0.1 * draw[keys], draw[keys]
        lowered = [tensor.to(torch.bfloat16) for tensor in (query, key, value)]
        exact = both_ways(SDPBackend.MATH, [tensor.double() for tensor in lowered])
        for name, backend in BACKENDS.items():
            try:
                results = both_ways(backend, lowered)
            except RuntimeError as refusal:
                note = str(refusal).splitlines()[0][:80]
                found.row("provoked", shape=shape, kernel=name, allowed=allowed[name], note=note)
                continue
            bad = sum(int((~tensor.isfinite()).sum()) for tensor in results)
            pairs = zip(results, exact, strict=True)
            error = None if bad else max(error_of(result, reference.float()) for result, reference in pairs)
            found.row("provoked", shape=shape, kernel=name, allowed=allowed[name], not_finite=bad, error=error)
            if allowed[name]:
                found.check(f"attention, {shape}, {name}: values that are not finite", bad, 0)


def compare(
    setup: Setup,
    found: Findings,
    shape: str,
    name: str,
    backend: SDPBackend,
    inputs: list[Tensor],
    exact: list[Tensor],
) -> None:
    """Check and time one kernel on one shape."""
    lowered = [tensor.to(torch.bfloat16) for tensor in inputs]
    try:
        results = both_ways(backend, [tensor[:2] for tensor in lowered])
    except RuntimeError as refusal:
        found.row("attention", shape=shape, kernel=name, ms=None, note=str(refusal).splitlines()[0][:80])
        return
    error = max(error_of(result, reference) for result, reference in zip(results, exact, strict=True))
    found.check(f"attention {shape}, {name}: error of values and gradients", error, MAX_ERROR)
    ms = 1e3 * seconds_of(lambda: both_ways(backend, lowered), setup)
    found.row("attention", shape=shape, kernel=name, ms=round(ms, 3), note="forward and backward")


def both_ways(backend: SDPBackend, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output, and the gradients of half its squared sum with respect to queries, keys and values."""
    query, key, value = leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with sdpa_kernel(backend):
        values = F.scaled_dot_product_attention(query, key, value)
        return [values.detach(), *torch.autograd.grad(values, leaves, values.detach())]


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


def error_of(result: Tensor, reference: Tensor) -> float:
    """Return the RMS of the difference over the RMS of the reference."""
    return float((result.float() - reference).norm() / reference.norm())
