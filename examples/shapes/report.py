"""The demo's results: report.html, samples.png, metrics.json and a summary for the terminal."""

import json
import textwrap
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from evaluation.report.markup import Section, macros, section
from evaluation.report.page import ReportConfig, render
from evaluation.report.runs import LoggedRun, read_runs
from examples.shapes.adherence import PHASES, newest_pictures, prompt_lists
from shards.open import open_store
from shards.tools.stats import root_totals

GRID = {"seen": 16, "held_out": 8}
"""Number of prompts from the start of each list that samples.png shows."""
COLUMNS = 8
MARGINS = {"left": 0.035, "right": 0.995, "bottom": 0.01, "top": 0.79, "hspace": 0.04, "wspace": 0.06}
LABELS = {"phase1": "phase 1, 64 px", "phase2": "phase 2, 128 px"}
TITLES = {
    "seen": "combinations of colour and shape in the training data",
    "held_out": "held-out combinations, which no training image or caption contains",
}
STEPS = {
    "world": "draw the images",
    "download": "download (img2dataset)",
    "precompute": "stage 1: precompute",
    "phase1": "stage 2: phase 1",
    "phase2": "stage 2: phase 2",
    "evaluate": "evaluate the checkpoints of both phases",
}


def write_report(folder: Path, seconds: dict[str, float]) -> None:
    """Write report.html, samples.png and metrics.json from the steps' results in `folder`, and print a summary."""
    runs = read_runs([str(folder / phase) for phase in PHASES])
    metrics = gather_metrics(folder, runs, seconds)
    draw_samples(folder)
    title = "From images to a text-to-image model on one small machine"
    page = render(runs, ReportConfig(prompts=8), title, [demo_section(metrics)])
    (folder / "report.html").write_text(page)
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print_summary(folder, metrics)


def gather_metrics(folder: Path, runs: list[LoggedRun], seconds: dict[str, float]) -> dict[str, Any]:
    """Collect the demo's counts and measurements."""
    totals = root_totals(open_store(folder / "latents"))
    adherence = json.loads((folder / "adherence.json").read_text())
    downloaded, accepted = totals.samples_in, totals.encoded
    return {
        "seconds": seconds | {"total": round(sum(seconds.values()), 1)},
        "images_in": downloaded,
        "accepted": accepted,
        "rejected": downloaded - accepted,
        "rejected_by_reason": dict(sorted(totals.rejected.items())),
        "buckets": totals.buckets,
        "precompute_images_per_second": round(downloaded / seconds["precompute"], 1),
        "train_images_per_second": {run.name: round(run.median("images_per_second") or 0, 1) for run in runs},
        "steps": {run.name: run.steps for run in runs},
        "adherence": {
            **adherence["phase2"]["seen"],
            "held_out": adherence["phase2"]["held_out"],
            "phase1": adherence["phase1"],
        },
        "toy_metrics": {run.name: list(run.evaluations[-1].rows) for run in runs},
    }


def demo_section(metrics: dict[str, Any]) -> Section:
    """Build the demo's own section of the report: how well images follow their prompts, and each step's duration."""
    adherence, seconds = metrics["adherence"], metrics["seconds"]
    figures = {
        "of images have the requested colour": f"{adherence['colour']:.0%}",
        "of images have the requested shape": f"{adherence['shape']:.0%}",
        "images in": f"{metrics['images_in']:,}",
        "accepted": f"{metrics['accepted']:,}",
        "minutes in total": f"{seconds['total'] / 60:.1f}",
    }
    judged = {
        "phase 1, seen combinations": adherence["phase1"]["seen"],
        "phase 1, held-out combinations": adherence["phase1"]["held_out"],
        "phase 2, seen combinations": adherence,
        "phase 2, held-out combinations": adherence["held_out"],
    }
    header = ["samples", "colour", "shape", "images"]
    scores = [[name, f"{s['colour']:.1%}", f"{s['shape']:.1%}", s["samples"]] for name, s in judged.items()]
    speeds = {"precompute": metrics["precompute_images_per_second"], **metrics["train_images_per_second"]}
    steps = [[title, f"{seconds[name]:.0f} s", speeds.get(name)] for name, title in STEPS.items()]
    return section(
        "demo",
        "What the demo did",
        macros.paragraph(
            "`make demo` drew captioned images, downloaded them over HTTP, encoded them once, and trained a U-Net on "
            "the latents in two phases without reading a pixel again. Held-out combinations of colour and shape occur "
            "in no training image or caption. The metrics below use a toy feature extractor, the mean colours of 4 × 4 "
            "cells. They show how evaluation works and cannot be compared with published values."
        ),
        macros.headline(figures),
        macros.table("Images that follow their prompt, judged by geometry", header, scores),
        macros.table("Images rejected in stage 1", ["reason", "images"], list(metrics["rejected_by_reason"].items())),
        macros.table("Duration", ["step", "duration", "images/s"], steps),
    )


def draw_samples(folder: Path) -> None:
    """Draw samples.png, which shows each prompt above its samples from phase 1 and phase 2."""
    pictures = {phase: newest_pictures(folder / phase) for phase in PHASES}
    prompts = prompt_lists()
    blocks = [(name, start) for name, count in GRID.items() for start in range(0, count, COLUMNS)]
    figure = Figure(figsize=(1.6 * COLUMNS, 4.3 * len(blocks)), dpi=90)
    parts: Any = figure.subfigures(len(blocks), 1)
    for part, (name, start) in zip(parts, blocks, strict=True):
        axes = part.subplots(2, COLUMNS, gridspec_kw=MARGINS)
        part.text(0.035, 0.96, TITLES[name], fontsize=10, weight="bold", va="center")
        for column in range(COLUMNS):
            for axis, phase in zip(axes[:, column], PHASES, strict=True):
                axis.imshow(pictures[phase][name][start + column], interpolation="nearest")
                axis.set(xticks=[], yticks=[], ylabel=LABELS[phase] if column == 0 else "")
            label = textwrap.wrap(prompts[name][start + column].text, 22)
            axes[0, column].set_title("\n".join(label), fontsize=8, va="bottom")
    figure.savefig(folder / "samples.png")


def print_summary(folder: Path, metrics: dict[str, Any]) -> None:
    """Print the three most important results, and where to find the rest."""
    held_out = metrics["adherence"]["held_out"]
    print(
        f"\nDone in {metrics['seconds']['total'] / 60:.1f} min. Of {held_out['samples']} images for combinations of "
        f"colour and shape that are in no training image, {held_out['colour']:.1%} have the right colour and "
        f"{held_out['shape']:.1%} the right shape.\n  images: {folder}/samples.png\n  report: {folder}/report.html"
    )
