"""Measure a stage 1 worker's overhead, and compare it with a simple script: `python -m bench.worker`.

The worker is `encode_tar` itself, on tars of JPEGs, into buckets of 256 and 512 px with Stable Diffusion 2's shapes.
Fake encoders replace the networks: one takes no time, and the other behaves like a GPU, taking a fixed time per image
in parallel with the worker's threads. `--only beside` runs the comparison with the simple script. Neither a GPU nor
weights are needed.
"""

import argparse
import os
import shutil
from pathlib import Path

from bench.kit.common import section
from bench.worker import alone, comparison
from bench.worker.alone import Options

IMAGES = 2000
COMPARED = {"demo": 1500, "photographs": 288}
"""Number of images in the comparison with the simple script with free encoders, which takes five minutes."""


def comparison_report(options: Options) -> str:
    """Compare the simple script with the worker, and return Markdown."""
    pictures = {name: max(1, int(number * options.images / IMAGES)) for name, number in COMPARED.items()}
    body = comparison.report(options.folder / "beside", pictures, options.threads, options.rounds)
    return f"{body}\n\nAt the end, the machine's load was {os.getloadavg()[0]:.1f}."


SECTIONS = {
    "alone": ("A stage 1 worker", alone.report),
    "beside": ("A worker compared with a simple script", comparison_report),
}


def main() -> None:
    """Measure, and print the sections."""
    parser = argparse.ArgumentParser(prog="bench.worker", description=__doc__)
    parser.add_argument("--only", choices=SECTIONS, help="run one section only")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench/worker"), help="folder for temporary files")
    parser.add_argument("--images", type=int, default=IMAGES, help="images per tar; a tenth of it for measuring memory")
    parser.add_argument("--shards", type=int, default=240, help="number of consecutive tars for measuring memory")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="decoding threads")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of comparisons that run in turn")
    parser.add_argument("--seconds-per-picture", type=float, default=0.01, help="speed of the sleeping encoder")
    arguments = vars(parser.parse_args())
    only, parent = arguments.pop("only"), arguments.pop("folder")
    options = Options(parent / "latentmill-bench", **arguments)
    shutil.rmtree(options.folder, ignore_errors=True)  # of a run that was killed
    options.folder.mkdir(parents=True)
    try:
        for name, (title, make) in SECTIONS.items():
            if only in (None, name):
                print(section(title, "bench.worker", make(options)))
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
