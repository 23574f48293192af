"""Speed of the machine, the trainer's step and the loader, and a profile of the step."""

import platform
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from bench.gpu_check.findings import RATE, Findings
from bench.gpu_check.kernels import kind_of
from bench.gpu_check.setup import Setup
from bench.kit.common import device_name, matmul_tflops, synchronize, timed
from bench.kit.roots import encoding_record, make_root
from bench.loader import BATCH, SD2_TEXT, Reading
from bench.train_step import TEXT_LENGTH, StepSetting, latent_hw, make_batch, measure, seconds_of_steps
from train.metrics import peak_memory
from train.model.backbone import BackboneConfig
from train.model.fit import dry_call
from train.model.flops import TRAIN_OVER_FORWARD
from train.model.network import build_network

PACKAGES = ("torch", "triton", "transformers", "diffusers", "accelerate", "numpy")


def machine(setup: Setup, found: Findings) -> None:
    """Measure a large matrix product and a copy, and record the versions of packages."""
    device = setup.device
    found.figure("device", device_name(device))
    found.figure("versions", {name: installed(name) for name in PACKAGES} | {"python": platform.python_version()})
    for name in ("bfloat16", "float16", "float32"):
        with setup.quiet():
            found.figure(RATE.format(name), matmul_tflops(device, getattr(torch, name), 256 if setup.small else None))
    source = torch.empty(1 << (20 if setup.small else 32), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    synchronize(device)
    with setup.quiet():
        start = time.perf_counter()
        for _ in range(5):
            target.copy_(source)
        synchronize(device)
        seconds = time.perf_counter() - start
    found.figure("copy GB/s, read and written", 10 * len(source) / seconds / 1e9)


def installed(name: str) -> str | None:
    """Return a package's version, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def training(setup: Setup, found: Findings, which: int, number: int, compiled: tuple[bool, ...]) -> None:
    """Time whole steps of bucket number `which` with its microbatch size number `number`, compiled or not."""
    bucket = setup.buckets[which]
    size = setup.microbatches(bucket)[number]
    settings = [StepSetting(bucket, size, True, True, how) for how in compiled]
    options = Namespace(batch=setup.batch, unet=setup.unet, precision="bfloat16", seconds=0.1 if setup.small else 6)
    accelerator = setup.accelerator(options.precision)
    for setting in settings:
        cells: dict[str, Any] = {"bucket": bucket, "microbatch": setting.microbatch_size, "with": setting.words}
        cells["batch"] = setup.batch
        if setting is not settings[0] and not found.has_time:
            found.row("steps", **cells, note="skipped for lack of time")
            continue
        start = time.perf_counter()
        with found.tried("steps", **cells):
            result = measure(setting, options, accelerator, build_network(setup.unet, 0), setup.quiet)
            took = f"{time.perf_counter() - start:.0f} s in total"
            rates = {"per_second": result.images_per_second, "tflops": result.tflops, "memory_gib": result.memory_gb}
            found.row("steps", **cells, **rates, note="out of memory" if result.images_per_second is None else took)


def loading(setup: Setup, found: Findings) -> None:
    """Time the loader alone, with samples of the first phase's size from the page cache."""
    samples = 2 * BATCH if setup.small else 16 * BATCH
    with tempfile.TemporaryDirectory() as folder:
        root = make_root(Path(folder) / "root", {setup.buckets[0]: [samples // 2] * 2}, SD2_TEXT)
        for workers in (0,) if setup.small else (1, 8):
            reading = Reading(root, setup.buckets[0], workers)
            reading()
            per_second = reading.spec.steps_per_epoch * BATCH / timed(reading)[0]
            reading.batches.close()
            found.row("loader", processes=workers, per_second=per_second)


def profiling(setup: Setup, found: Findings) -> None:
    """Time the step at the larger size, profile one by kernel, and compare it with its arithmetic at the matrix rate.

    If compilation fails, do so with the eager step.
    """
    setting, batch = setup.profiled
    with found.tried("profiled", **{"with": setting.words}):
        profile_step(setup, found, setting, batch)
        return
    profile_step(setup, found, replace(setting, compile=False), batch)


def profile_step(setup: Setup, found: Findings, setting: StepSetting, batch: int) -> None:
    """Time steps and profile one of them."""
    device = setup.device
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with setup.training(setting, "bfloat16", setup.unet, batch) as (train_step, step):
        train_step(make_batch(setting.bucket, setting.microbatch_size, build_network(setup.unet, None)), 0)  # compiles
        with setup.quiet():
            seconds = seconds_of_steps(step, device, 0.1 if setup.small else 6)
            memory = peak_memory(device) / 2**30
            with profile(activities=[activity]) as profiler:
                step()
                synchronize(device)
        found.figure("memory GiB", memory)
        found.figure("weights and optimizer GiB", 16 * sum(p.numel() for p in train_step.network.parameters()) / 2**30)
    cells: dict[str, Any] = {"bucket": setting.bucket, "microbatch": setting.microbatch_size, "with": setting.words}
    tflops = sum(step_flops(setup, batch).values()) / seconds / 1e12
    found.row("steps", **cells, batch=batch, per_second=batch / seconds, tflops=tflops, memory_gib=memory)
    describe_step(setup, found, profiler.events() or [], seconds, batch)


def describe_step(setup: Setup, found: Findings, events: Iterable[FunctionEvent], seconds: float, batch: int) -> None:
    """Record time and launches per kernel class, the ideal times, and the gaps between kernels."""
    with setup.quiet():
        rate = matmul_tflops(setup.device, side=256 if setup.small else None)
    counted = step_flops(setup, batch)
    on_gpu = setup.device.type == "cuda"
    where = "CUDA" if on_gpu else "CPU"
    kernels = [event for event in events if event.device_type.name == where and not event.is_user_annotation]
    times, launches, slowest = Counter[str](), Counter[str](), Counter[str]()
    for event in kernels:
        name, microseconds = kind_of(event.name), event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        times[name] += microseconds
        slowest[event.name] += microseconds
        launches[name] += 1
    busy = sum(times.values()) / 1e6
    found.figure("step", {"seconds": seconds, "images": batch, "matrix TFLOP/s": rate})
    for name, microseconds in times.most_common():
        ideal = counted.get(name, 0) / rate / 1e12
        found.row(
            "kernels", what=name, ms=microseconds / 1e3, launches=launches[name], at_the_matrix_rate_ms=ideal * 1e3
        )
    found.row("kernels", what="gaps", ms=max(0.0, seconds - busy) * 1e3, launches=0, at_the_matrix_rate_ms=0.0)
    for kernel, microseconds in slowest.most_common(20):
        found.row("slowest kernels", kernel=kernel[:100], ms=microseconds / 1e3)


def step_flops(setup: Setup, batch: int) -> dict[str, float]:
    """Count the FLOPs of a step by class on the meta device, as three times those of the forward pass."""
    unet = build_network(setup.unet, None)
    record = encoding_record(TEXT_LENGTH, unet.config.cross_attention_dim)
    backbone = BackboneConfig().resolved(record.texts)
    _, call = dry_call(unet, backbone, record, latent_hw(setup.buckets[1]))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    found: Counter[str] = Counter()
    for operator, flops in counter.get_flop_counts()["Global"].items():
        # on the meta device, attention is two batched products
        found["attention" if "bmm" in str(operator) else kind_of(str(operator))] += TRAIN_OVER_FORWARD * batch * flops
    return dict(found)
