"""Tabulate finished demos, for example of five seeds: `python -m bench.demo runs/demo-*`."""

import argparse
import json
from pathlib import Path

from scipy import stats

from bench.kit.common import mean_and_interval, table
from evaluation.metrics.intervals import wilson

STEPS = {"data": ("world", "download"), "stage 1": ("precompute",), "training": ("phase1", "phase2")}
"""Column → steps whose durations it adds up."""


def share(right: float, samples: int) -> str:
    """Describe a share of images with its 95 % Wilson interval."""
    low, high = wilson(right, samples, stats.norm.ppf(0.975))
    return f"{right:.1%} ({low:.0%} to {high:.0%})"


def main() -> None:
    """Print the minutes of each demo, and the shares of its held-out images that follow their prompt."""
    parser = argparse.ArgumentParser(prog="bench.demo", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    rows = []
    shares: dict[str, list[float]] = {"colour": [], "shape": []}
    for folder in parser.parse_args().folders:
        metrics, state = (json.loads((folder / f"{name}.json").read_text()) for name in ("metrics", "state"))
        seconds, found = metrics["seconds"], metrics["adherence"]["held_out"]
        minutes = [sum(seconds[step] for step in steps) / 60 for steps in STEPS.values()]
        for name, values in shares.items():
            values.append(found[name])
        rows.append(
            [
                state["settings"]["seed"],
                *(share(found[name], found["samples"]) for name in shares),
                *(f"{metrics['adherence'][name]:.1%}" for name in shares),
                *(f"{value:.1f}" for value in (*minutes, seconds["evaluate"] / 60, seconds["total"] / 60)),
            ]
        )
    header = ["seed", "held-out colour", "held-out shape", "seen colour", "seen shape"]
    print(table([*header, *STEPS, "evaluation", "total, minutes"], rows))
    for name, values in shares.items():
        print(f"\nHeld-out {name}, mean over the seeds with its 95 % t-interval: {mean_and_interval(values, '.1%')}")


if __name__ == "__main__":
    main()
