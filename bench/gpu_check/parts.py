"""The parts of the check. `python -m bench.gpu_check.parts NAME --output FILE` runs one of them in this process."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.gpu_check import attention, choices, correctness, prediction, speed, towers
from bench.gpu_check.findings import Findings
from bench.gpu_check.setup import Setup, use_no_compiler

BEGIN_WITHIN = 0.5
"""Share of a part's time limit after which it starts no further measurement."""


@dataclass(frozen=True)
class CheckPart:
    """A part of the check, which runs in its own process."""

    run: Callable[[Setup, Findings], None]
    seconds: float
    """Time limit, after which the part is killed. Its findings up to then count."""
    alone: bool = True
    """Whether no other part may run at the same time, because this one measures times."""
    on_host: bool = False
    """Whether the device is hidden from it."""


PARTS = {
    "draws": CheckPart(correctness.draws, 60, alone=False),
    "curves": CheckPart(correctness.curves, 120, alone=False),
    "splitting": CheckPart(correctness.splitting, 120, alone=False),
    "compiling": CheckPart(correctness.compiling, 150, alone=False),
    "batches": CheckPart(towers.batches, 150, alone=False),
    "prediction": CheckPart(prediction.predicting, 150, alone=False, on_host=True),
    "machine": CheckPart(speed.machine, 40),
    "training-large": CheckPart(partial(speed.training, which=1), 160),
    "encoders": CheckPart(towers.rates, 100),
    "profile": CheckPart(speed.profiling, 80),
    "training-small": CheckPart(partial(speed.training, which=0), 120),
    "decoding": CheckPart(towers.decoding, 40),
    "attention": CheckPart(attention.attention, 40),
    "loader": CheckPart(speed.loading, 60),
    "choices": CheckPart(choices.choices, 150),
}
"""Correctness comes first, and then timings in order of importance. The limits add up to more than a check's time
budget. Parts that were skipped for lack of time can be run by name afterwards."""


def main() -> None:
    """Run one part in this process."""
    parser = argparse.ArgumentParser(prog="bench.gpu_check.parts", description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the findings")
    options = parser.parse_args(sys.argv[1:])
    if options.small:
        use_no_compiler()
    found = Findings(options.output, BEGIN_WITHIN * options.seconds)
    torch.backends.cudnn.allow_tf32 = False  # like the product
    PARTS[options.name].run(Setup(torch.device(options.device), options.small), found)
    if found.failed:
        sys.exit("failed: " + "; ".join(found.failed))


if __name__ == "__main__":
    main()
