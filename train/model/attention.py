"""Check that the attention kernels that a run may use are correct on its GPU."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shards.base.device import AttentionKernel, Precision, device_module, is_accelerator, is_device_error
from shards.base.errors import RequestError

BACKENDS: dict[AttentionKernel, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PROVOKING = (
    (64, 64, False),
    (4096, 64, False),
    (64, 192, False),
    (77, 77, False),
    (64, 77, False),
    (1, 128, False),
    (64, 64, True),
    (64, 192, True),
)
"""(queries, keys, whether a mask is passed) of the inputs on which kernels are tried. The mask hides nothing."""


@dataclass(frozen=True)
class Outcome:
    """The result of one kernel on one input of `PROVOKING`."""

    name: str
    inputs: list[Tensor]
    """Queries, keys and values."""
    results: list[Tensor]
    """Output and gradients from `both_ways`; empty if the kernel does not support the input."""
    refusal: str | None = None
    """Message with which torch refused the input."""

    @property
    def not_finite(self) -> int | None:
        """Number of output and gradient values that are not finite; None: the kernel does not support the input."""
        return sum(int((~tensor.isfinite()).sum()) for tensor in self.results) if self.refusal is None else None


def provoke(device: torch.device, kernel: AttentionKernel, precision: Precision = "bfloat16") -> Iterator[Outcome]:
    """Try a kernel on inputs on which kernels are known to fail.

    cuDNN's backward pass returned NaN for 64 keys and rows whose log-sum-exp is below -88.7 (pytorch #196678; for 128
    keys, NVIDIA/cudnn-frontend #1072). Here, all logits are close to -120.
    """
    made = torch.Generator(device).manual_seed(0)
    for tokens, keys, is_masked in PROVOKING:
        name = f"{tokens} tokens, {keys} keys, logits near -120{', masked' if is_masked else ''}"
        direction = F.normalize(torch.randn(64, generator=made, device=device), dim=0)
        draw = {n: torch.randn((4, 5, n, 64), generator=made, device=device) for n in {tokens, keys}}
        query, key, value = 31 * direction + 0.1 * draw[tokens], -31 * direction + 0.1 * draw[keys], draw[keys]
        lowered = [tensor.to(getattr(torch, precision)) for tensor in (query, key, value)]
        mask = lowered[0].new_zeros(4, 1, tokens, keys) if is_masked else None
        try:
            results = both_ways(kernel, lowered, mask)
        except RuntimeError as refusal:
            if is_device_error(refusal) or isinstance(refusal, torch.OutOfMemoryError):
                raise
            yield Outcome(name, lowered, [], str(refusal).partition("\n")[0])
            continue
        yield Outcome(name, lowered, results)


def both_ways(kernel: AttentionKernel, inputs: list[Tensor], mask: Tensor | None = None) -> list[Tensor]:
    """Return the output, and the gradients of half its squared sum with respect to queries, keys and values.

    Args:
        mask: added to the logits.

    Raises:
        RuntimeError: the kernel does not support the inputs.
    """
    query, key, value = leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with sdpa_kernel(BACKENDS[kernel]), warnings.catch_warnings(action="ignore"):  # they explain a refusal
        values = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return [values.detach(), *torch.autograd.grad(values, leaves, values.detach())]


def check_attention(kernels: Sequence[AttentionKernel], device: torch.device, precision: Precision) -> None:
    """Check that a run's attention kernels return finite values on provoking inputs, if they support them.

    Raises:
        RequestError: a kernel returned values that are not finite.
    """
    for kernel in kernels:
        for outcome in provoke(device, kernel, precision):
            if num_wrong := outcome.not_finite:
                where = device_module().get_device_name(device) if is_accelerator(device) else "this CPU"
                raise RequestError(
                    f"attention lists {kernel}, but on {where} with torch {torch.__version__}, this kernel returned "
                    f"{num_wrong} values that are not finite for {outcome.name}. Training would get NaN gradients on "
                    f"such inputs. Remove {kernel} from `attention`."
                )
