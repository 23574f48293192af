"""Tabulate finished demos, for example of five seeds: `python -m bench.demo runs/demo-*`."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy import stats

from bench.kit.common import table
from evaluation.metrics.intervals import share_interval, wilson
from train.run.reporting.json_lines import read_json_lines, step_seconds

TEXT_LENGTH = 24
"""Tokens of a caption."""
SIDES = {1: 8, 2: 16}
"""Phase → side length of its latents."""


def share(right: float, samples: int) -> str:
    """Describe a share of images with its 95 % Wilson interval."""
    low, high = wilson(right, samples, stats.norm.ppf(0.975))
    return f"{right:.1%} ({low:.0%} to {high:.0%})"


def training_flops(network: Mapping[str, Any], side: int) -> int:
    """Return the FLOPs per image of a training step on latents of `side` x `side`."""
    import torch
    from diffusers import UNet2DConditionModel

    from train.model import flops

    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(network)
        text = torch.empty(1, TEXT_LENGTH, unet.config.cross_attention_dim)
        inputs = torch.empty(1, 4, side, side), torch.empty(1), text
        return flops.training_flops(lambda: unet(*inputs))


def training(folder: Path) -> tuple[float, float]:
    """Return the training FLOPs of a demo's two phases in units of 10^12, and the seconds that their steps took."""
    flops = seconds = 0.0
    for phase, side in SIDES.items():
        run = folder / f"phase{phase}"
        config = yaml.safe_load((run / "config.yaml").read_text())
        per_image = training_flops(json.loads(Path(config["backbone"]["config"]).read_text()), side)
        lines = read_json_lines(run / "metrics.jsonl")
        flops += lines[-1]["step"] * config["global_batch_size"] * per_image
        seconds += sum(duration for duration, _ in step_seconds(lines, config["global_batch_size"]))
    return flops / 1e12, seconds


def minutes(seconds: Mapping[str, float], of_steps: float) -> dict[str, float]:
    """Return the minutes of a demo's parts, from the seconds of its steps and of the training steps alone."""
    parts = {
        "data": seconds["world"] + seconds["download"],
        "stage 1": seconds["precompute"],
        "training steps": of_steps,
        "rest of training": seconds["phase1"] + seconds["phase2"] - of_steps,
        "evaluation": seconds["evaluate"],
        "total, minutes": seconds["total"],
    }
    return {name: value / 60 for name, value in parts.items()}


def main() -> None:
    """Print the minutes of each demo, and the shares of its held-out images that follow their prompt."""
    parser = argparse.ArgumentParser(prog="bench.demo", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    rows, seeds, times = [], [], {}
    hits: dict[str, list[np.ndarray]] = {"colour": [], "shape": []}
    for number, folder in enumerate(parser.parse_args().folders):
        metrics, state = (json.loads((folder / f"{name}.json").read_text()) for name in ("metrics", "state"))
        seen, found = metrics["adherence"], metrics["adherence"]["held_out"]
        tflop, of_steps = training(folder)
        times = minutes(metrics["seconds"], of_steps)
        rows.append(
            [
                state["settings"]["seed"],
                *(share(found[name], found["samples"]) for name in hits),
                *(f"{seen[name]:.1%}" for name in hits),
                *(f"{value:.1f}" for value in times.values()),
                f"{tflop:.1f}",
            ]
        )
        seeds += [number] * found["samples"]
        for name, by_demo in hits.items():
            by_demo.append(np.arange(found["samples"]) < round(found[name] * found["samples"]))
    print(table(["seed", "held-out colour", "held-out shape", "seen colour", "seen shape", *times, "TFLOP"], rows))
    if len(rows) > 1:
        for name, by_demo in hits.items():
            mean = share_interval(np.concatenate(by_demo), np.array(seeds), f"share of images with the right {name}")
            print(
                f"\nHeld-out {name}, all seeds: {mean.value:.1%} ({mean.low:.0%} to {mean.high:.0%}, clustered by seed)"
            )


if __name__ == "__main__":
    main()
