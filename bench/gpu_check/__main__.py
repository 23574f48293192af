"""Check a GPU's correctness and speed: `python -m bench.gpu_check first --output runs/gpu-check`, then `second`.

The parts are in lanes, each of which is a process, so that one part compiles while another one measures. A part that
fails or takes too long does not affect the others. The command writes gpu-check.json, which `make plan ARGS="--measured
FILE"` reads, and gpu-check.md. It exits with 1 if a check fails or a part does not finish. `--device cpu --small`
rehearses the check without a GPU.
"""

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Generator, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from queue import Queue
from threading import Event
from typing import Any

import torch
from pydantic import ValidationError

from bench.gpu_check.page import gpu_kind, page
from bench.gpu_check.parts import HALVES, LANES, PARTS, SIDE_BY_SIDE, PartRun, begin_lane
from bench.kit.common import bench_file, best_rates, device_name, encoder_rates, write_bench_file
from plan.measured import BenchFile, Measurement, read_rates
from shards.base.durable import write_atomically
from shards.base.errors import RequestError, WorkError, exit_code_of

TAIL = 15
"""Number of output lines shown for a part that failed."""
MINUTES = 9.0
"""Default time budget of each half of the check."""
MIN_SECONDS = 10.0
"""A part is not started with less time than this left."""


@dataclass(frozen=True)
class CheckRun:
    """Settings shared by all parts."""

    device: str
    small: bool
    output: Path
    minutes: float
    """Time budget of all parts."""
    default_minutes: float
    begun: float
    """Start of the check by the monotonic clock."""

    def seconds_for(self, name: str) -> float:
        """Return a part's time limit in seconds. It grows with the budget, up to the time that is left."""
        left = 60 * self.minutes - (time.monotonic() - self.begun)
        return min(PARTS[name].seconds * max(1, self.minutes / self.default_minutes), left)


def check(arguments: list[str]) -> None:
    """Run the parts and write their findings.

    Raises:
        RequestError: there is no GPU, a part is unknown, or a file to compare with is missing or invalid.
        WorkError: a check failed, or a part did not finish.
    """
    options = parse(arguments)
    if options.device not in ("cuda", "cpu"):
        raise RequestError(
            f"`--device {options.device}` is not supported. Use `cuda` or `cpu`, and choose a GPU with "
            f"CUDA_VISIBLE_DEVICES: the check uses the first visible one."
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RequestError(
            "torch finds no GPU on this machine. Rehearse the check without one with `--device cpu --small`."
        )
    if unknown := sorted(set(options.parts) - set(PARTS) - set(HALVES)):
        raise RequestError(
            f"Unknown part: {', '.join(unknown)}. Choose from {', '.join(PARTS)}, or {' or '.join(HALVES)}, which run "
            f"half of them each."
        )
    read_rates(options.compare, gpu_kind(device_name(torch.device(options.device))))  # fails before anything runs
    halves = {half: [name for lane in lanes for name in lane] for half, lanes in HALVES.items()}
    names = list(dict.fromkeys(name for word in options.parts or halves for name in halves.get(word, [word])))
    default_minutes = MINUTES * sum(not set(half).isdisjoint(names) for half in halves.values())
    minutes = default_minutes if options.minutes is None else options.minutes
    run = CheckRun(options.device, options.small, options.output, minutes, default_minutes, time.monotonic())
    parts, text = kept(run.output, names), ""
    with closing(run_parts(run, names)) as running:
        for name, found in running:
            parts[name] = found
            text = write(run, parts, options.compare)
    print(text)
    wrong = [name for name in parts if parts[name]["outcome"] != "done" or not right(parts[name])]
    if wrong:
        raise WorkError(
            f"The check failed in {', '.join(wrong)}. {run.output / 'gpu-check.md'} lists the failed checks and the "
            f"unfinished parts."
        )


def kept(output: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Load an earlier check's findings of the parts that are not run again.

    Raises:
        RequestError: the file is damaged.
    """
    path = output / "gpu-check.json"
    if len(names) == len(PARTS) or not path.exists():
        return {}
    try:
        parts: dict[str, dict[str, Any]] = BenchFile.model_validate_json(path.read_bytes()).details
    except ValidationError as error:
        raise RequestError(
            f"{path} is damaged or from a different version of the check, so no parts can be added to it. Give a "
            f"different --output, or run all parts."
        ) from error
    return {name: part for name, part in parts.items() if name not in names}


def write(run: CheckRun, parts: dict[str, dict[str, Any]], others: list[str]) -> str:
    """Write the findings so far to gpu-check.json and gpu-check.md, and return the report."""
    device = device_name(torch.device(run.device))
    bench = planner_file(device, {name: parts[name] for name in PARTS if name in parts})
    write_bench_file(run.output / "gpu-check.json", bench)
    text = page(bench, others, time.monotonic() - run.begun)
    write_atomically(run.output / "gpu-check.md", text.encode())
    return text


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(prog="bench.gpu_check", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; default: all")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu-check"), help="folder for the results")
    parser.add_argument("--device", default="cuda", help="cuda or cpu; default: cuda")
    parser.add_argument("--small", action="store_true", help="rehearse with small networks and without a compiler")
    budget = f"time budget of all parts; a slow machine needs more; default: {MINUTES:g} for each half of the check"
    parser.add_argument("--minutes", type=float, help=budget)
    compare = "benchmark file whose rates to list next to the measured ones; may be repeated"
    parser.add_argument("--compare", action="append", default=[], metavar="FILE", help=compare)
    return parser.parse_args(arguments)


def run_parts(run: CheckRun, names: list[str]) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """Run the parts, and yield each one's name and findings when it ends. Lanes run side by side.

    Closing the generator kills them, and so does an exception such as Ctrl-C.
    """
    lanes = [chosen for lane in LANES if (chosen := [name for name in lane if name in names])]
    ended: Queue[tuple[str, dict[str, Any]] | BaseException] = Queue()
    processes = [LaneProcess(run) for _ in lanes]
    stopped = Event()

    def run_lane(process: LaneProcess, lane: list[str]) -> None:
        try:
            for name in lane:
                if stopped.is_set():
                    return
                ended.put((name, run_part(run, process, name)))
        except BaseException as error:
            ended.put(error)
        finally:
            process.kill()

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        running = [pool.submit(run_lane, *pair) for pair in zip(processes, lanes, strict=True)]
        try:
            for _ in names:
                part = ended.get()
                if isinstance(part, BaseException):
                    raise part
                yield part
        finally:
            stopped.set()
            while wait(running, timeout=0.1).not_done:  # a lane may have been about to start its process
                for process in processes:
                    process.kill()


class LaneProcess:
    """The process in which a lane's parts run, so that torch is imported only once. If a part ends it, the next part
    starts a new one."""

    def __init__(self, run: CheckRun) -> None:
        self.check_run = run
        self.executor: ProcessPoolExecutor | None = None
        self.pid: int | None = None

    def run(self, part: PartRun) -> str:
        """Run a part, and return `done` or the reason why it did not finish."""
        try:
            if self.executor is None:
                settings = self.check_run.device, self.check_run.small, os.getpid()
                self.executor = ProcessPoolExecutor(1, get_context("spawn"), initializer=begin_lane, initargs=settings)
                self.pid = self.executor.submit(os.getpid).result(part.seconds)
            self.executor.submit(part).result(part.seconds)
        except TimeoutError:
            self.kill()
            return f"ended after {part.seconds:.0f} s"
        except Exception as error:
            if isinstance(error, BrokenExecutor):
                self.kill()
            said = "".join(traceback.format_exception(error)).splitlines()
            path = part.output.with_suffix(".log")
            log = path.read_text(errors="replace").splitlines() if path.exists() else []
            return "failed:\n" + "\n".join([*log[-TAIL:], *said[-TAIL:]])
        return "done"

    def kill(self) -> None:
        """End the process and the compilers that it started. Any thread may call this."""
        executor, pid = self.executor, self.pid
        self.executor = self.pid = None
        if pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        if executor is not None:
            executor.shutdown(wait=False)


def run_part(run: CheckRun, process: LaneProcess, name: str) -> dict[str, Any]:
    """Run a part in its lane's process, and return its findings, outcome and duration."""
    begun, path = time.monotonic(), run.output / "parts" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    seconds = run.seconds_for(name)
    outcome = "not started: no time was left"
    if seconds > MIN_SECONDS:
        print(f"{time.monotonic() - run.begun:.0f} s: {name} …", file=sys.stderr, flush=True)
        outcome = process.run(PartRun(name, run.device, run.small, seconds, path, run.output / "device.lock"))
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    took = round(time.monotonic() - begun, 1)
    return {"checks": [], "tables": {}, "figures": {}, **found, "outcome": outcome, "seconds": took}


def right(part: dict[str, Any]) -> bool:
    """Return whether all of a part's checks hold."""
    return all(line["right"] for line in part["checks"])


def planner_file(device: str, parts: dict[str, dict[str, Any]]) -> BenchFile:
    """Make a device's benchmark file for the planner: the best rate of each stage and bucket (for stage 1, of one
    mode), and all findings as details."""
    return bench_file("bench.gpu_check", device, best_rates(measurements(parts)), details=parts)


def measurements(parts: dict[str, dict[str, Any]]) -> Iterator[Measurement]:
    """Yield the rates that the parts measured (for encoders, those of one mode only)."""

    def rows(title: str) -> Iterator[dict[str, Any]]:
        tables = (part["tables"].get(title, []) for part in parts.values())
        return (row for table in tables for row in table if row.get("per_second"))

    for row in rows("steps"):
        yield Measurement(
            stage="train",
            bucket=row["bucket"],
            images_per_second_per_gpu=row["per_second"],
            global_batch_size=row["batch"],
            microbatch_size=row["microbatch"],
        )
    for row in rows("decoding"):
        yield Measurement(stage=row["what"], images_per_second_per_gpu=row["per_second"])
    yield from encoder_rates((row["what"], row["per_second"]) for row in faster_mode(list(rows("encoders"))))


def faster_mode(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows measured with compilation or those without, since `workers.compile` applies to all encoders.

    The mode with more rows is chosen, and of two complete ones, the one that takes less time for one input of each row.
    """
    modes = [[row for row in rows if row["compiled"] is compiled] for compiled in (True, False)]
    return min(modes, key=lambda mode: (-len(mode), sum(1 / row["per_second"] for row in mode)))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(exit_code_of(lambda: check(sys.argv[1:])))
