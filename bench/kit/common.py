"""What every benchmark shares: where it ran, fair pairs of timings, and the tables of docs/evidence/benchmarks.md."""

import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch


def machine() -> str:
    """Processor, usable cores, GPU and the date, on one line."""
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cores = len(os.sched_getaffinity(0))
    return f"{processor}, {cores} cores, {gpu}, torch {torch.__version__}, {date.today()}"


@dataclass(frozen=True)
class Pair:
    """Two ways of doing one thing, timed in turn in one run."""

    first_seconds: list[float]
    second_seconds: list[float]

    @property
    def ratios(self) -> list[float]:
        """Second's time over first's, round by round: above 1 the first is faster."""
        return [b / a for a, b in zip(self.first_seconds, self.second_seconds, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of `ratios`."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> str:
        """Lowest and highest of `ratios`."""
        return f"{min(self.ratios):.2f} to {max(self.ratios):.2f}"


def timed_in_turn(
    first: Callable[[], object],
    second: Callable[[], object],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Pair:
    """Run both once unmeasured, then in turn `rounds` times, so that a noisy machine disturbs both alike; one that is
    busy with other work does not disturb time.process_time."""
    first()
    second()
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for times, function in zip(seconds, (first, second), strict=True):
            start = clock()
            function()
            times.append(clock() - start)
    return Pair(*seconds)


def matmul_tflops(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, side: int | None = None, rounds: int = 7
) -> float:
    """What a large square matrix product reaches on `device`, in TFLOP/s: 2·side³ over the median time of `rounds`.

    It is what shares of "the measured matrix rate" are taken of. Measure it in the run that the share is about, on the
    warm device: clocks, power limits and, on a CPU, the number of threads decide it as much as the chip does.

    Args:
        side: rows and columns; by default 8192 on a GPU, where larger ones gain nothing, and 1024 on a CPU.
    """
    cuda = device.type == "cuda"
    side = side or (8192 if cuda else 1024)
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    # one product of a GPU is shorter than the jitter of a clock
    products = 20 if cuda else 1

    def multiply() -> None:
        for _ in range(products):
            torch.mm(left, right)
        synchronize(device)

    multiply()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        multiply()
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 * products / statistics.median(seconds) / 1e12


def status_mb(field: str) -> float:
    """A line of /proc/self/status in MB: `VmRSS`, what is resident, or `VmHWM`, the most that was.

    (`getrusage`'s peak is the parent's where that was higher when it started this process.)
    """
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) / 1024


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done what it was given; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def command(module: str) -> str:
    """What was typed to run the benchmark `module`."""
    return f"python -m {module} {shlex.join(sys.argv[1:])}".rstrip()


def section(title: str, module: str, body: str) -> str:
    """One section of docs/evidence/benchmarks.md: what was measured, by which command, where, and when."""
    return f"## {title}\n\n`{command(module)}` on {machine()}:\n\n{body}\n"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """`content` and where it was measured, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **content}, indent=2) + "\n")
