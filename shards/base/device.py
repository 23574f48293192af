"""Devices: access to the accelerator, choice of device and precision, and the number of usable CPU cores.

All code that depends on the kind of accelerator is here. The other packages call `is_accelerator`, and use the
accelerator's streams, events and memory statistics through `device_module`.

torch is imported inside the functions, so that parsing a config does not require this slow import.
"""

import functools
import math
import os
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shards.base.errors import RequestError

if TYPE_CHECKING:
    import torch

Precision = Literal["float32", "float16", "bfloat16"]
PrecisionOption = Literal["auto", "float32", "float16", "bfloat16"]
DeviceOption = Literal["auto", "cpu", "cuda"]
AttentionKernel = Literal["flash", "cudnn", "efficient", "math"]

SAFE_KERNELS: tuple[AttentionKernel, ...] = ("flash", "efficient", "math")
"""Attention kernels used by default. On Hopper, cuDNN's kernel is the fastest, but its backward pass returns NaN for
some sequence lengths (pytorch #196678)."""

# To support accelerators other than NVIDIA GPUs and AMD GPUs (for which torch's ROCm build uses the same names), change
# these constants and `DeviceOption`.
ACCELERATOR = "cuda"
"""torch's name for the accelerator's device type."""
COLLECTIVES = "nccl"
"""torch.distributed's backend for the accelerator."""
DEVICE_ERROR = "CUDA error"
"""Text in every error after which a process can no longer use its accelerator."""

TRIAL_CHANNELS, TRIAL_SIDE = 64, 16
"""Tensor sizes for the timing trial, small enough that it takes under 100 ms on a CPU that emulates bfloat16."""
TRIAL_SECONDS = 0.02
"""CPU time that is measured per data type, after one warm-up run."""
WARN_SLOWDOWN = 1.5
"""Slowdown relative to float32 at which a lower precision, explicitly chosen on a CPU, triggers a warning."""


def is_accelerator(device: "torch.device | str") -> bool:
    """Return whether a device is an accelerator rather than the CPU."""
    return str(device).partition(":")[0] == ACCELERATOR


def has_accelerator() -> bool:
    """Return whether torch can use an accelerator in this process."""
    return bool(device_module().is_available())


def device_module() -> Any:
    """Return torch's module for the accelerator, such as torch.cuda, whether or not the machine has one."""
    import torch

    return torch.get_device_module(ACCELERATOR)


def memory_of(device: "torch.device") -> int:
    """Return the size of an accelerator's memory in bytes."""
    _, total = device_module().mem_get_info(device)
    return int(total)


FLOAT8_MULTIPLE = 16
"""GPUs multiply float8 matrices only if their inner and output sizes are multiples of this."""


def multiplies_float8(device: "torch.device") -> bool:
    """Return whether an accelerator multiplies float8 matrices in hardware, as NVIDIA's do from Ada and Hopper on."""
    import torch

    capability: tuple[int, int] = device_module().get_device_capability(device)
    return torch.version.hip is None and capability >= (8, 9)


def best_device() -> str:
    """Return the type of the accelerator if torch can use one, and `cpu` otherwise."""
    return ACCELERATOR if has_accelerator() else "cpu"


def worker_device(num_gpus: float) -> str:
    """Return the device type for a Ray worker that was granted `num_gpus` GPUs, which may be a fraction of one."""
    return ACCELERATOR if num_gpus else "cpu"


def host_buffer(shape: tuple[int, ...], dtype: "torch.dtype", device: "torch.device") -> "torch.Tensor":
    """Return uninitialised host memory for copies to and from `device`, page-locked if the device is an accelerator."""
    import torch

    return torch.empty(shape, dtype=dtype, pin_memory=is_accelerator(device))


def collectives_backend(device: str) -> str:
    """Return the torch.distributed backend for tensors on this type of device."""
    return COLLECTIVES if is_accelerator(device) else "gloo"


def is_device_error(error: Exception) -> bool:
    """Return whether an error leaves the accelerator unusable for the rest of the process."""
    return DEVICE_ERROR in str(error)


def choose_attention(device: "torch.device", kernels: Collection[AttentionKernel] = SAFE_KERNELS) -> None:
    """Enable the scaled_dot_product_attention kernels in `kernels`, if the device is an accelerator. On a CPU, disable
    the one that is slow for training.

    Call this before the network is compiled, because a compiled graph keeps the kernel chosen when it was traced. The
    key of torch's cache is set, too, because otherwise a graph with other kernels could be loaded (pytorch #185449).
    """
    import torch
    import torch.compiler.config as compiler

    if is_accelerator(device):
        given = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
        compiler.cache_key_tag = " ".join([given, "attention", *sorted(kernels)]).strip()
        torch.backends.cuda.enable_flash_sdp("flash" in kernels)
        torch.backends.cuda.enable_cudnn_sdp("cudnn" in kernels)
        torch.backends.cuda.enable_mem_efficient_sdp("efficient" in kernels)
        torch.backends.cuda.enable_math_sdp("math" in kernels)
    else:
        # this flag also governs the CPU kernel, whose bfloat16 backward pass is 5 to 15 times slower than the
        # plain kernel's on the short sequences typical of training on a CPU
        torch.backends.cuda.enable_flash_sdp(False)


def choose_device(requested: DeviceOption = "auto", devices: Path = Path("/dev")) -> str:
    """Return the requested device; for `auto`, the accelerator if torch can use one and `cpu` otherwise. Raises
    RequestError if torch cannot use a GPU although one was requested or the machine has an NVIDIA GPU."""
    if requested == "cpu":
        return "cpu"
    if has_accelerator():
        return ACCELERATOR
    has_gpu = has_nvidia_gpu(devices)
    if requested != "auto" or has_gpu:
        raise RequestError(unusable_gpu(has_gpu))
    return "cpu"


def has_nvidia_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether this process sees an NVIDIA GPU, without importing torch, which might be unable to use it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    return any(devices.glob("nvidia[0-9]*")) and not hidden


def unusable_gpu(has_gpu: bool, driver: Path = Path("/sys/module/nvidia/version")) -> str:
    """Return an error message that explains why torch cannot use a GPU, with the driver and torch versions, and says
    what to install."""
    import torch

    version = driver.read_text().strip() if driver.is_file() else None
    found = f"driver {version}" if version else "no loaded NVIDIA driver"
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
    subject = "This machine has an NVIDIA GPU, but torch" if has_gpu else "A GPU was requested, but torch"
    remedy = (
        f"Install a torch build that this driver supports (`uv pip install --torch-backend=auto torch torchvision`), "
        f"or a driver for {built}"
        if torch.version.cuda
        else "Install a torch build with CUDA (`uv pip install --torch-backend=auto torch torchvision`)"
    )
    return (
        f"{subject} {torch.__version__}, built for {built}, cannot use it ({found}). {remedy}. To run on the CPU "
        f"instead, pass `--device cpu` to training, or `--workers.num_gpus 0` to the other commands."
    )


def resolve_precision(requested: PrecisionOption, device: str, say: Callable[[str], None] | None = None) -> Precision:
    """Resolve `auto` to the best precision for `device`, which must be present on this machine.

    On a GPU, `auto` is bfloat16 if the hardware supports it. On a CPU, it is bfloat16 if a short trial finds it no
    slower than float32; CPUs without native support emulate it at 8 to 30 times the cost.

    Args:
        say: callable that receives one line saying how `auto` was resolved, or warning that the requested precision
            is emulated.
    """
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    if requested == "auto":
        if is_accelerator(device):
            return "bfloat16" if device_module().is_bf16_supported(including_emulation=False) else "float32"
        slowdown = cpu_slowdown("bfloat16")
        chosen: Precision = "bfloat16" if slowdown <= 1 else "float32"
        say(f"precision: auto selects {chosen}; on this CPU, bfloat16 takes {slowdown:.2g} times as long as float32")
        return chosen
    if requested != "float32" and device == "cpu" and (slowdown := cpu_slowdown(requested)) >= WARN_SLOWDOWN:
        say(
            f"warning: this CPU emulates {requested}, which takes {slowdown:.2g} times as long as float32. "
            f"Use `--precision auto` or `--precision float32`, unless you need the exact results of {requested}."
        )
    return requested


@functools.cache
def cpu_slowdown(precision: Precision) -> float:
    """Time a convolution and a matrix product, forward and backward, in `precision`. Return the time relative to
    float32.

    The trial uses a single thread and measures its CPU time, so that other processes hardly change the result.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # the caller may be in inference mode, where autograd records nothing
        with torch.inference_mode(False), torch.enable_grad():
            return _trial(precision) / _trial("float32")
    finally:
        torch.set_num_threads(threads)


def _trial(precision: Precision) -> float:
    """Return the CPU time, in seconds, of a convolution and a matrix product in `precision`: the mean of several
    runs."""
    import torch
    from torch.nn import functional

    dtype = getattr(torch, precision)
    weights = torch.full((TRIAL_CHANNELS, TRIAL_CHANNELS, 3, 3), 0.01, dtype=dtype, requires_grad=True)
    matrix = torch.full((4 * TRIAL_CHANNELS, TRIAL_CHANNELS), 0.01, dtype=dtype, requires_grad=True)
    image = torch.ones(1, TRIAL_CHANNELS, TRIAL_SIDE, TRIAL_SIDE, dtype=dtype)
    spent, num_runs, is_warm = 0.0, 0, False
    while spent < TRIAL_SECONDS:
        started = time.thread_time()
        tokens = functional.conv2d(image, weights, padding=1).flatten(2).transpose(1, 2)
        torch.autograd.grad(functional.linear(tokens, matrix).sum(), [weights, matrix])
        if is_warm:
            spent, num_runs = spent + time.thread_time() - started, num_runs + 1
        is_warm = True
    return spent / num_runs


def available_cores(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of CPU cores this process may use: the size of its affinity mask, capped by the CPU quotas of
    its cgroups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([cores, *_quotas(cgroups, own)])))


def _quotas(cgroups: Path, own: Path) -> list[float]:
    """Return the CPU quotas, in cores, of the process's cgroups and their ancestors (cgroup v1 and v2)."""
    found = []
    for line in own.read_text().splitlines() if own.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = cgroups / controllers if controllers else cgroups
        # in a container, the path may be the host's while the container's own cgroup is mounted at the base
        for folder in [base / path.lstrip("/"), *(base / path.lstrip("/")).parents]:
            found.append(_quota(folder))
            if folder == base:
                break
    return [quota for quota in found if quota is not None]


def _quota(folder: Path) -> float | None:
    """Return the CPU quota of one cgroup in cores, or None if it is unlimited."""
    version_2, version_1 = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if version_2.is_file():
        quota, period = version_2.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    if version_1.is_file():
        quota_us, period_us = int(version_1.read_text()), int((folder / "cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 else None
    return None
