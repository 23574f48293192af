"""The parts of the check, and one of them in this process: `python -m bench.gpu_check.parts NAME --output FILE`."""

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
"""Share of a part's time within which it may begin something more."""


@dataclass(frozen=True)
class Part:
    """One part, which runs in a process of its own."""

    run: Callable[[Setup, Findings], None]
    seconds: float
    """It may take; then it is ended, and what it had found by then counts."""
    alone: bool = True
    """Nothing else runs beside it, as it takes times."""
    on_host: bool = False
    """It is not shown the device."""


PARTS = {
    "draws": Part(correctness.draws, 60, alone=False),
    "curves": Part(correctness.curves, 120, alone=False),
    "splitting": Part(correctness.splitting, 120, alone=False),
    "compiling": Part(correctness.compiling, 150, alone=False),
    "batches": Part(towers.batches, 150, alone=False),
    "prediction": Part(prediction.predicting, 150, alone=False, on_host=True),
    "machine": Part(speed.machine, 40),
    "training-large": Part(partial(speed.training, which=1), 160),
    "encoders": Part(towers.rates, 100),
    "profile": Part(speed.profiling, 80),
    "training-small": Part(partial(speed.training, which=0), 120),
    "decoding": Part(towers.decoding, 40),
    "attention": Part(attention.attention, 40),
    "loader": Part(speed.loading, 60),
    "choices": Part(choices.choices, 150),
}
"""What is right comes first; of what is timed, what matters most. The times are bounds: together they are more than a
check has, and parts for which nothing is left can be given by name afterwards."""


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(prog="bench.gpu_check.parts", description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    options = parser.parse_args(sys.argv[1:])
    if options.small:
        use_no_compiler()
    found = Findings(options.output, BEGIN_WITHIN * options.seconds)
    torch.backends.cudnn.allow_tf32 = False  # as the product has it
    PARTS[options.name].run(Setup(torch.device(options.device), options.small), found)
    if found.failed:
        sys.exit("failed: " + "; ".join(found.failed))


if __name__ == "__main__":
    main()
