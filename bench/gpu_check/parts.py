"""The parts of the check, and how one of them runs in its lane's process."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.gpu_check import attention, choices, correctness, float8, speed, towers
from bench.gpu_check.families import FamilyPhase
from bench.gpu_check.findings import Findings
from bench.gpu_check.setup import Setup, use_no_compiler
from bench.train_step import release
from shards.base.pool import die_with

BEGIN_WITHIN = 0.5
"""Share of a part's time limit after which it starts no further measurement."""


@dataclass(frozen=True)
class CheckPart:
    """A part of the check."""

    run: Callable[[Setup, Findings], None]
    seconds: float
    """Time limit, after which the part is killed. Its findings up to then count."""


HALVES: dict[str, list[dict[str, CheckPart]]] = {
    "first": [
        {
            "machine": CheckPart(speed.machine, 60),
            "profile": CheckPart(speed.profiling, 300),
            "encoders": CheckPart(towers.rates, 200),
            "training-small": CheckPart(partial(speed.training, which=0, number=0, compiled=(True, False)), 300),
        },
        {
            "attention": CheckPart(attention.attention, 60),
            "curves": CheckPart(correctness.curves, 120),
            "compiling": CheckPart(correctness.compiling, 150),
            "sana": CheckPart(FamilyPhase("sana", 1).run, 200),
            "sd3": CheckPart(FamilyPhase("sd3", 1).run, 200),
            "sdxl": CheckPart(FamilyPhase("sdxl", 1).run, 250),
            "draws": CheckPart(correctness.draws, 60),
        },
    ],
    "second": [
        {
            "sd2": CheckPart(FamilyPhase("sd2", 2, ("whole", "blocks")).run, 300),
            "t5": CheckPart(towers.t5, 120),
            "training-large": CheckPart(partial(speed.training, which=1, number=1, compiled=(True,)), 300),
            "choices": CheckPart(choices.choices, 200),
            "decoding": CheckPart(towers.decoding, 40),
        },
        {
            "splitting": CheckPart(correctness.splitting, 90),
            "pixart-sigma": CheckPart(FamilyPhase("pixart-sigma", 1, ("eager", "blocks", "half recomputed")).run, 250),
            "prx": CheckPart(FamilyPhase("prx", 1).run, 200),
            "flux1": CheckPart(FamilyPhase("flux1", 2, ("blocks", "float8", "all recomputed")).run, 250),
            "float8": CheckPart(float8.layers, 100),
            "batches": CheckPart(towers.batches, 250),
            "loader": CheckPart(speed.loading, 60),
        },
    ],
}
"""Half of the check → its lanes. Lanes run side by side; the parts of a lane run one after another, the most important
ones first. Only one part at a time may time anything (`Setup.quiet`); meanwhile, the other lane compiles or waits."""
SIDE_BY_SIDE = 2
"""Number of lanes that run at a time. Each may use an equal share of the device's memory."""
LANES = [lane for half in HALVES.values() for lane in half]
PARTS = {name: part for lane in LANES for name, part in lane.items()}


def begin_lane(device: str, small: bool, parent: int) -> None:
    """Prepare a lane's process. It gets its own process group, so that the compilers that it starts end with it, and
    ends when process `parent` dies, which runs the check."""
    os.setsid()
    if not die_with(parent):
        sys.exit(1)
    torch.backends.cudnn.allow_tf32 = False  # like the product
    if torch.device(device).type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1 / SIDE_BY_SIDE)
    if small:
        use_no_compiler()


@dataclass(frozen=True)
class PartRun:
    """A part to run in a lane's process."""

    name: str
    device: str
    small: bool
    seconds: float
    """Time limit, after which the process is killed."""
    output: Path
    """JSON file for the findings."""
    lock: Path | None = None
    """File to lock while timing."""

    def __call__(self) -> None:
        """Run the part in this process, with its output in a log next to its findings.

        Raises:
            RuntimeError: an error was caught in one of several independent measurements.
        """
        with self.output.with_suffix(".log").open("w") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        found, device = Findings(self.output, BEGIN_WITHIN * self.seconds), torch.device(self.device)
        try:
            PARTS[self.name].run(Setup(device, self.small, self.lock), found)
        finally:
            torch.backends.cudnn.benchmark = False
            torch.backends.cuda.enable_cudnn_sdp(True)
            release(device)
        if found.failed:
            raise RuntimeError("; ".join(found.failed))
