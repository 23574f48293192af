"""Helpers of all benchmarks: a description of the machine, timings in turn, and Markdown output."""

import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from plan.measured import BenchFile, Measurement
from shards.base.durable import write_atomically

ROUNDS = 7
"""Number of timings in `matmul_tflops`."""


def machine() -> str:
    """Describe the processor, usable cores, GPU, torch version and date on one line."""
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
    """Two ways of doing the same thing, timed in turn in one run."""

    first_seconds: list[float]
    second_seconds: list[float]

    @property
    def ratios(self) -> list[float]:
        """Time of the second way divided by that of the first, per round. Above 1, the first way is faster."""
        return [b / a for a, b in zip(self.first_seconds, self.second_seconds, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of `ratios`."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> str:
        """Lowest and highest of `ratios`, as text."""
        return f"{min(self.ratios):.2f} to {max(self.ratios):.2f}"


def timed_in_turn(
    first: Callable[[], object],
    second: Callable[[], object],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Pair:
    """Time two functions in turn, so that noise on the machine affects both equally.

    Each function runs once without being timed, then `rounds` times. Other work on the machine does not affect
    `time.process_time` as the clock.
    """
    first()
    second()
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for times, function in zip(seconds, (first, second), strict=True):
            start = clock()
            function()
            times.append(clock() - start)
    return Pair(*seconds)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Call a function, and return the seconds it took and its result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def matmul_tflops(device: torch.device, dtype: torch.dtype = torch.bfloat16, side: int | None = None) -> float:
    """Measure the throughput of a large square matrix product, in TFLOP/s: 2·side³ over the median of ROUNDS timings.

    Benchmarks report their own throughput as a share of this rate. Measure it in the same run and on the warm device,
    because it depends on clocks, power limits and, on a CPU, the number of threads as much as on the chip.

    Args:
        side: rows and columns. Defaults to 8192 on a GPU, where larger matrices gain nothing, and to 1024 on a CPU.
    """
    cuda = device.type == "cuda"
    side = side or (8192 if cuda else 1024)
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    # on a GPU, one product takes less time than the jitter of the clock
    products = 20 if cuda else 1

    def multiply() -> None:
        for _ in range(products):
            torch.mm(left, right)
        synchronize(device)

    multiply()
    seconds = statistics.median(timed(multiply)[0] for _ in range(ROUNDS))
    return 2 * side**3 * products / seconds / 1e12


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process, so that memory and torch's threads are not shared."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # raises an error if the process dies
        return pool.submit(function, *arguments).result()


def status_mb(field: str) -> float:
    """Read a field of /proc/self/status in MB, such as `VmRSS` (resident memory) or `VmHWM` (its peak).

    `getrusage` is not used because its peak includes the parent's, if that was higher at the fork.
    """
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) / 1024


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error is torch.OutOfMemoryError, or an equivalent error of cuDNN or cuBLAS."""
    return any(said in str(error) for said in ("out of memory", "ALLOC_FAILED"))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def mean_and_interval(values: Sequence[float], form: str) -> str:
    """Describe the mean of values with its 95 % t-interval (none for a single value), each number formatted like
    `form`."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:{form}}"
    from scipy import stats  # not installed on every machine that runs the GPU check

    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{mean:{form}} [{mean - half:{form}}, {mean + half:{form}}]"


def command(module: str) -> str:
    """Return the command line that runs the benchmark `module` with this process's arguments."""
    return f"python -m {module} {shlex.join(sys.argv[1:])}".rstrip()


def section(title: str, module: str, body: str) -> str:
    """Format a Markdown section with a title, the command, the machine, the date and the body."""
    return f"## {title}\n\n`{command(module)}` on {machine()}:\n\n{body}\n"


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or `CPU`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def bench_file(
    module: str, device: str, measurements: Iterable[Measurement], details: dict[str, Any] | None = None
) -> BenchFile:
    """Make a benchmark file for `make plan` from what `module` measured today on one device."""
    today, found = str(date.today()), list(measurements)
    return BenchFile(
        device=device, gpus=1, date=today, command=command(module), measurements=found, details=details or {}
    )


def encoder_rates(rates: Iterable[tuple[str, float]]) -> Iterator[Measurement]:
    """Yield the planner's measurements of encoders, given (name, rate): those of captions (`text`) and of buckets."""
    for name, rate in rates:
        if name not in ("mixed", "ids"):
            stage, bucket = ("text", None) if name == "text" else ("encode", name)
            yield Measurement.model_validate({"stage": stage, "bucket": bucket, "images_per_second_per_gpu": rate})


def best_rates(measurements: Iterable[Measurement]) -> Iterable[Measurement]:
    """Return the best rate of each stage and bucket, in the order in which they first occur."""
    best: dict[tuple[str, str | None], Measurement] = {}
    for measurement in measurements:
        key = measurement.stage, measurement.bucket
        pair = best.get(key, measurement), measurement
        best[key] = max(pair, key=lambda each: each.images_per_second_per_gpu)
    return best.values()


def write_bench_file(path: Path, bench: BenchFile) -> None:
    """Write a benchmark file as JSON."""
    write_atomically(path, (bench.model_dump_json(indent=2, exclude_none=True) + "\n").encode())
