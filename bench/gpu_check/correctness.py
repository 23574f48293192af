"""Checks that training computes the same on this device as elsewhere: precisions, compilation, sharding, draws."""

import math
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu_check.findings import Findings
from bench.gpu_check.setup import Setup
from bench.train_step import DTYPES, StepSetting, make_batch
from train.data.draws import Draws, Purpose
from train.model.config import AdamWConfig, ScheduleConfig
from train.model.network import build_network
from train.model.sharding import shard_weights
from train.step import TrainStep

BUCKET, BATCH, MICROBATCH = "64x64", 16, 8
RATE = 3e-4
FAST = {"optimizer": AdamWConfig(lr=RATE), "schedule": ScheduleConfig(warmup_steps=5)}
"""A small network's losses must fall within a few tens of steps. With 1e-3, the curves of two precisions diverge on
CPUs and GPUs alike, because single steps overshoot."""
LOWERED, ROUNDED = 0.005, 1e-3
"""Maximum difference of a curve relative to its first loss, for a lower precision and for a different summation
order."""
PURPOSES = (Purpose.NOISE, Purpose.TIMESTEP, Purpose.POSTERIOR)


def curves(setup: Setup, found: Findings) -> None:
    """Compare the trainer's losses in each precision with those in float32, and the latter with the CPU's."""
    exact = losses(setup, "float32")
    found.figure("float32", exact)
    middle = len(exact) // 2
    found.check("float32: the losses fall (last half over first)", fmean(exact[middle:]) / fmean(exact[:middle]), 1.0)
    for precision in setup.precisions[1:]:
        lowered = losses(setup, precision)
        found.figure(precision, lowered)
        found.check(f"{precision}: largest difference from float32's curve", apart(lowered, exact), LOWERED)
    if setup.device.type != "cpu":
        on_cpu = losses(Setup(torch.device("cpu"), setup.small), "float32")
        found.check("float32: largest difference from the CPU's curve", apart(exact, on_cpu), ROUNDED)


def compiling(setup: Setup, found: Findings) -> None:
    """Compare the losses of the compiled step with those of the eager one."""
    cases = (("float32", ROUNDED, False), ("bfloat16", LOWERED, True))
    for precision, most, low_norms in cases[setup.small :]:
        eager, compiled = losses(setup, precision), losses(setup, precision, True, low_norms)
        how = precision + " and low precision norms" * low_norms
        found.check(f"{how}: largest difference of the compiled curve from the eager one", apart(compiled, eager), most)


def losses(setup: Setup, precision: str, compiled: bool = False, low_precision_norms: bool = False) -> list[float]:
    """Return the losses of `setup.steps` trainer steps on one batch, with new random draws in every step."""
    torch.compiler.reset()
    setting = StepSetting(BUCKET, MICROBATCH, setup.device.type == "cuda", low_precision_norms, compiled)
    with setup.training(setting, precision, setup.curve_unet, BATCH, **FAST) as (_, step):
        found = [step().sums.total / BATCH]  # compiles
        with setup.quiet():
            found += [step().sums.total / BATCH for _ in range(setup.steps - 1)]
    # includes the steps that float16's scaler skips until it has found its scale
    return [loss for loss in found if math.isfinite(loss)]


def apart(curve: list[float], reference: list[float]) -> float:
    """Return the largest difference relative to the reference's first loss; infinite if the lengths differ."""
    if len(curve) != len(reference):
        return float("inf")
    return max(abs(a - b) for a, b in zip(curve, reference, strict=True)) / reference[0]


def splitting(setup: Setup, found: Findings) -> None:
    """Check that sharding the weights with FSDP2, over one process, does not change the losses."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("nccl" if setup.device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
        try:
            for precision, most in (("float32", ROUNDED), ("bfloat16", LOWERED)):
                whole, split = (plain_losses(setup, precision, split) for split in (False, True))
                found.check(f"{precision}: largest difference of the sharded curve", apart(split, whole), most)
        finally:
            dist.destroy_process_group()


def plain_losses(setup: Setup, precision: Any, split: bool) -> list[float]:
    """Return the losses like `losses`, but without accelerate, which shards nothing on one process."""
    setting = StepSetting(BUCKET, MICROBATCH)
    with setup.training(setting, "float32", setup.curve_unet, BATCH, **FAST) as (train_step, _), setup.quiet():
        return plain_steps(setup, train_step, precision, split)


def plain_steps(setup: Setup, train_step: TrainStep, precision: Any, split: bool) -> list[float]:
    """Train a new network with the step's loss, and return its losses."""
    unet = build_network(setup.curve_unet, 0).to(setup.device)
    batch = make_batch(BUCKET, BATCH, unet).to(setup.device)
    if split:
        shard_weights(unet, "full", precision)
    adamw = AdamWConfig(lr=RATE).build(dict(unet.named_parameters()))
    found = []
    for step in range(setup.steps):
        with torch.autocast(setup.device.type, DTYPES[precision], enabled=precision != "float32"):
            noisy = train_step.loss.add_noise(batch, Draws(0, step, batch.slots))
            loss = train_step.loss(unet, noisy).total.mean()
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        found.append(float(loss.detach()))
    return found


def draws(setup: Setup, found: Findings) -> None:
    """Check that random words and uniforms are bit-equal to the CPU's, and normals equal up to rounding."""
    slots = torch.arange(64)
    here, there = (Draws(1234, 567, slots.to(device)) for device in ("cpu", setup.device))
    for purpose in PURPOSES:
        same = torch.equal(here.words(purpose, 4096), there.words(purpose, 4096).cpu())
        found.check(f"{purpose.name}: words that differ from the CPU's", float(not same), 0)
    same = torch.equal(here.uniform(Purpose.TIMESTEP), there.uniform(Purpose.TIMESTEP).cpu())
    found.check("uniforms that differ from the CPU's", float(not same), 0)
    shape = (4, 32, 32)
    ours, theirs = (each.normal(Purpose.NOISE, shape).cpu() for each in (here, there))
    found.check("normals: largest difference from the CPU's", float((ours - theirs).abs().max()), 1e-5)
