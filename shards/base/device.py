"""The device that runs a command, the precision that suits it, and the CPU cores that may be used.

torch is imported inside the functions: reading a config must not cost its import.
"""

import functools
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from shards.base.errors import RequestError

Precision = Literal["float32", "float16", "bfloat16"]
AskedPrecision = Literal["auto", "float32", "float16", "bfloat16"]
AskedDevice = Literal["auto", "cpu", "cuda"]

CHANNELS, SIDE = 64, 16
"""Size of the trial: small enough that a CPU that emulates bfloat16 finishes it in under 100 ms."""
TRIAL_SECONDS = 0.02
"""How long each type is timed, after one run that is not counted."""
WORTH_A_WARNING = 1.5
"""From this slowdown on, a lowered precision on a CPU is warned about."""


def choose_device(asked: AskedDevice = "auto", devices: Path = Path("/dev")) -> Literal["cpu", "cuda"]:
    """Return `cuda` if torch can use a GPU here, otherwise `cpu`; or the device that was asked for.

    Raises:
        RequestError: the machine has an NVIDIA GPU, or one was asked for, but torch cannot use it.
    """
    if asked == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    has_gpu = any(devices.glob("nvidia[0-9]*")) and not hidden
    if asked == "cuda" or has_gpu:
        raise RequestError(unusable_gpu(has_gpu))
    return "cpu"


def unusable_gpu(has_gpu: bool, driver: Path = Path("/sys/module/nvidia/version")) -> str:
    """Explain why torch sees no GPU: which driver and which torch build there are, and what to install."""
    import torch

    version = driver.read_text().strip() if driver.is_file() else None
    found = f"driver {version}" if version else "no loaded NVIDIA driver"
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
    seen = "This machine has an NVIDIA GPU, but torch" if has_gpu else "A GPU was asked for, but torch"
    remedy = (
        f"Install a torch build that this driver supports (`uv pip install --torch-backend=auto torch torchvision`), "
        f"or a driver for {built}"
        if torch.version.cuda
        else "Install a torch build with CUDA (`uv pip install --torch-backend=auto torch torchvision`)"
    )
    return (
        f"{seen} {torch.__version__}, built for {built}, cannot use it ({found}). {remedy}. To run on the CPU on "
        f"purpose, set the option for it: `--device cpu` in training, `--workers.num_gpus 0` elsewhere."
    )


def resolve_precision(asked: AskedPrecision, device: str, say: Callable[[str], None] | None = None) -> Precision:
    """Turn `auto` into the precision that suits `device`, which must be a device of this machine.

    On a GPU that is bfloat16 where the hardware has it. On a CPU it is bfloat16 where a short trial finds it no slower
    than float32: CPUs without instructions for it emulate it, at 8 to 30 times the cost.

    Args:
        say: is given one line on what `auto` became, or a warning that an explicit precision is emulated here.
    """
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    if asked == "auto":
        if device == "cuda":
            import torch

            return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
        slowdown = cpu_slowdown("bfloat16")
        chosen: Precision = "bfloat16" if slowdown <= 1 else "float32"
        say(f"precision: auto is {chosen}; on this CPU, bfloat16 takes {slowdown:.2g} × the time of float32")
        return chosen
    if asked != "float32" and device == "cpu" and (slowdown := cpu_slowdown(asked)) >= WORTH_A_WARNING:
        say(
            f"warning: this CPU emulates {asked}, which takes {slowdown:.2g} × the time of float32. Set "
            f"`--precision auto` (or float32), unless the numbers must be those of {asked}."
        )
    return asked


@functools.cache
def cpu_slowdown(precision: Precision) -> float:
    """Time of one convolution and one matrix product in `precision` over that in float32, forward and backward.

    One thread works: other processes on the machine then disturb both types alike.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # a caller may be in inference mode, which would record nothing to differentiate
        with torch.inference_mode(False), torch.enable_grad():
            return _trial(precision) / _trial("float32")
    finally:
        torch.set_num_threads(threads)


def _trial(name: Precision) -> float:
    """Time the convolution and the product in the type `name`: the shortest of several runs, in seconds."""
    import torch
    from torch.nn import functional

    dtype = getattr(torch, name)
    weights = torch.full((CHANNELS, CHANNELS, 3, 3), 0.01, dtype=dtype, requires_grad=True)
    matrix = torch.full((4 * CHANNELS, CHANNELS), 0.01, dtype=dtype, requires_grad=True)
    image = torch.ones(1, CHANNELS, SIDE, SIDE, dtype=dtype)
    shortest, spent, is_warm = math.inf, 0.0, False
    while spent < TRIAL_SECONDS:
        started = time.perf_counter()
        tokens = functional.conv2d(image, weights, padding=1).flatten(2).transpose(1, 2)
        torch.autograd.grad(functional.linear(tokens, matrix).sum(), [weights, matrix])
        if is_warm:
            seconds = time.perf_counter() - started
            shortest, spent = min(shortest, seconds), spent + seconds
        is_warm = True
    return shortest


def available_cores(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Number of CPU cores that this process may keep busy: its affinity, within its cgroups' CPU quotas."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([cores, *_quotas(cgroups, own)])))


def _quotas(cgroups: Path, own: Path) -> list[float]:
    """CPU quotas, in cores, of the process's cgroups and of those above them (version 1 and 2)."""
    found = []
    for line in own.read_text().splitlines() if own.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = cgroups / controllers if controllers else cgroups
        # in a container the path may be the host's, and its own cgroup is mounted at the base
        for folder in [base / path.lstrip("/"), *(base / path.lstrip("/")).parents]:
            found.append(_quota(folder))
            if folder == base:
                break
    return [quota for quota in found if quota is not None]


def _quota(folder: Path) -> float | None:
    """CPU quota of one cgroup in cores; None where there is no limit."""
    version_2, version_1 = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if version_2.is_file():
        quota, period = version_2.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    if version_1.is_file():
        quota_us, period_us = int(version_1.read_text()), int((folder / "cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 else None
    return None
