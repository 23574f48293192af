"""What the demo leaves behind: report.html, samples.png, metrics.json, and a short table on the terminal."""

import json
import textwrap
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from evaluation.report.markup import Section, headline, paragraph, section, table
from evaluation.report.page import ReportConfig, render
from evaluation.report.runs import LoggedRun, read_runs
from examples.shapes.adherence import PHASES, newest_pictures, prompt_lists
from shards.open import open_store
from shards.tools.stats import root_totals

GRID = {"seen": 16, "held_out": 8}
"""How many prompts of each list samples.png shows: the first ones."""
COLUMNS = 8
MARGINS = {"left": 0.035, "right": 0.995, "bottom": 0.01, "top": 0.79, "hspace": 0.04, "wspace": 0.06}
LABELS = {"phase1": "phase 1, 64 px", "phase2": "phase 2, 128 px"}
TITLES = {
    "seen": "combinations of colour and shape that training showed",
    "held_out": "combinations that no training picture showed and no caption named",
}
STEPS = {
    "world": "draw the pictures",
    "download": "download (img2dataset)",
    "precompute": "stage 1: precompute",
    "phase1": "stage 2: phase 1",
    "phase2": "stage 2: phase 2",
    "evaluate": "evaluate the checkpoints of both phases",
}


def write_report(folder: Path, seconds: dict[str, float]) -> None:
    """All three files, from what the steps left in `folder`; prints the table."""
    runs = read_runs([str(folder / phase) for phase in PHASES])
    metrics = gather_metrics(folder, runs, seconds)
    draw_samples(folder)
    title = "From pictures to a text-to-image model, on one small machine"
    page = render(runs, ReportConfig(prompts=8), title, [demo_section(metrics)])
    (folder / "report.html").write_text(page)
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print_table(folder, metrics)


def gather_metrics(folder: Path, runs: list[LoggedRun], seconds: dict[str, float]) -> dict[str, Any]:
    """The demo in numbers; everything here was counted or measured by the run itself."""
    totals = root_totals(open_store(folder / "latents"))
    adherence = json.loads((folder / "adherence.json").read_text())
    final = adherence["phase2"]["seen"]
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
            "colour": final["colour"],
            "shape": final["shape"],
            "samples": final["samples"],
            "held_out": adherence["phase2"]["held_out"],
            "phase1": adherence["phase1"],
        },
        "toy_metrics": {run.name: list(run.evaluations[-1].rows) for run in runs},
    }


def demo_section(metrics: dict[str, Any]) -> Section:
    """What is the demo's alone: whether pictures show what was asked for, and what each step took."""
    adherence, seconds = metrics["adherence"], metrics["seconds"]
    figures = {
        "show the colour asked for": f"{adherence['colour']:.0%}",
        "show the shape asked for": f"{adherence['shape']:.0%}",
        "pictures in": f"{metrics['images_in']:,}",
        "accepted": f"{metrics['accepted']:,}",
        "minutes, all steps": f"{seconds['total'] / 60:.1f}",
    }
    judged = {
        "phase 1, seen combinations": adherence["phase1"]["seen"],
        "phase 1, held-out combinations": adherence["phase1"]["held_out"],
        "phase 2, seen combinations": adherence,
        "phase 2, held-out combinations": adherence["held_out"],
    }
    scores = [[name, f"{s['colour']:.1%}", f"{s['shape']:.1%}", s["samples"]] for name, s in judged.items()]
    speeds = {"precompute": metrics["precompute_images_per_second"], **metrics["train_images_per_second"]}
    steps = [[title, f"{seconds[name]:.0f} s", speeds.get(name)] for name, title in STEPS.items()]
    return section(
        "demo",
        "What make demo did",
        paragraph(
            "It drew a world of captioned pictures, downloaded it over HTTP, encoded it once, and trained a U-Net on "
            "the latents in two phases, without loading a pixel again. Held-out combinations of colour and shape are "
            "in no training picture and in no caption. The metrics below have a toy for their extractor, mean colours "
            "of 4 × 4 cells: they show how evaluation goes, and compare with nobody's."
        ),
        headline(figures),
        table("Judged by plain geometry on the pixels", ["samples of", "colour", "shape", "pictures"], scores),
        table("Time", ["step", "took", "images/s"], steps),
    )


def draw_samples(folder: Path) -> None:
    """samples.png: each prompt above its two samples, phase 1 over phase 2."""
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


def print_table(folder: Path, metrics: dict[str, Any]) -> None:
    adherence, stored = metrics["adherence"], metrics["buckets"].items()
    counts = f"{metrics['images_in']} / {metrics['accepted']} / {metrics['rejected']}"
    speeds = ", ".join(f"{phase} {speed} img/s" for phase, speed in metrics["train_images_per_second"].items())
    toys = ", ".join(
        "{metric} {value:.3f} [{low:.3f}, {high:.3f}]".format(**r) for r in metrics["toy_metrics"]["phase2"]
    )
    rows = [
        ("pictures in / accepted / rejected", counts),
        ("rejected by reason", ", ".join(f"{reason} {n}" for reason, n in metrics["rejected_by_reason"].items())),
        ("samples stored", ", ".join(f"{b} {f['samples']} ({f['bytes_per_sample']} B)" for b, f in stored)),
        ("stage 1", f"{metrics['precompute_images_per_second']} img/s"),
        ("stage 2", speeds),
        ("colour as asked", f"{adherence['colour']:.1%} (held-out combinations {adherence['held_out']['colour']:.1%})"),
        ("shape as asked", f"{adherence['shape']:.1%} (held-out combinations {adherence['held_out']['shape']:.1%})"),
        ("by a toy extractor, with 95 %", toys),
        ("time", f"{metrics['seconds']['total'] / 60:.1f} min"),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in rows))
    print(f"\n  open {folder}/report.html; the samples are in {folder}/samples.png")
