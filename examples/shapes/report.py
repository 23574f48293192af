"""What the demo leaves behind: samples.png, loss.png, metrics.json, report.html, and a short table on the terminal."""

import base64
import html
import json
import textwrap
from collections import Counter
from pathlib import Path
from string import Template
from typing import Any

import matplotlib

from shards.open import open_store

matplotlib.use("agg")
import numpy as np
from matplotlib import pyplot as plt

from examples.shapes.sampling import prompt_lists
from shards.format.encoding import EncodingRecord
from shards.format.towers import ONLY_TEXT
from shards.root.committed import load_committed
from shards.tools.stats import bucket_sizes
from train.run.metrics import read_json_lines
from train.run.plot import smooth

PHASES = ("phase1", "phase2")
GRID = {"seen": 16, "held_out": 8}
"""How many prompts of each list the picture shows: the first ones."""
COLUMNS = 8
MARGINS = {"left": 0.035, "right": 0.995, "bottom": 0.01, "top": 0.79, "hspace": 0.04, "wspace": 0.06}
LABELS = {"phase1": "phase 1, 64 px", "phase2": "phase 2, 128 px"}
TITLES = {
    "seen": "combinations of colour and shape that training showed",
    "held_out": "combinations that no training picture showed and no caption named",
}

TEMPLATE = Path(__file__).with_name("report_template.html")


def write_report(folder: Path, seconds: dict[str, float]) -> None:
    """All four files, from what the steps left in `folder`; prints the table."""
    metrics = gather_metrics(folder, seconds)
    draw_samples(folder)
    draw_losses(folder)
    (folder / "report.html").write_text(render(folder, metrics))
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print_table(folder, metrics)


def gather_metrics(folder: Path, seconds: dict[str, float]) -> dict[str, Any]:
    """The demo in numbers; everything here was counted or measured by the run itself."""
    books = load_committed(open_store(folder / "latents"))
    adherence = json.loads((folder / "adherence.json").read_text())
    final = adherence["phase2"]["seen"]
    downloaded, accepted = sum(tar.samples_in for tar in books), sum(tar.encoded for tar in books)
    rejected = sum((Counter(tar.rejected) for tar in books), Counter())
    training = {phase: read_json_lines(folder / phase / "metrics.jsonl") for phase in PHASES}
    return {
        "seconds": seconds | {"total": round(sum(seconds.values()), 1)},
        "images_in": downloaded,
        "accepted": accepted,
        "rejected": downloaded - accepted,
        "rejected_by_reason": dict(sorted(rejected.items())),
        "buckets": bucket_sizes(books),
        "precompute_images_per_second": round(downloaded / seconds["precompute"], 1),
        "train_images_per_second": {
            phase: round(float(np.median([row["images_per_second"] for row in rows])), 1)
            for phase, rows in training.items()
        },
        "steps": {phase: rows[-1]["step"] for phase, rows in training.items()},
        "adherence": {
            "colour": final["colour"],
            "shape": final["shape"],
            "samples": final["samples"],
            "held_out": adherence["phase2"]["held_out"],
            "phase1": adherence["phase1"],
        },
    }


def draw_samples(folder: Path) -> None:
    """samples.png: each prompt above its two samples, phase 1 over phase 2."""
    pictures = {phase: np.load(folder / f"samples-{phase}.npz") for phase in PHASES}
    prompts = prompt_lists()
    blocks = [(name, start) for name, count in GRID.items() for start in range(0, count, COLUMNS)]
    figure = plt.figure(figsize=(1.6 * COLUMNS, 4.3 * len(blocks)), dpi=90)
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
    plt.close(figure)


def draw_losses(folder: Path) -> None:
    """loss.png: both phases side by side, on one scale."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), dpi=110, sharey=True)
    for axis, phase in zip(axes, PHASES, strict=True):
        rows = read_json_lines(folder / phase / "metrics.jsonl")
        steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
        axis.plot(steps, losses, color="#9ecae1", linewidth=1, label="loss")
        axis.plot(steps, smooth(losses, 0.9), color="#08519c", linewidth=2, label="smoothed (0.9)")
        axis.set_yscale("log")
        axis.set_title({"phase1": "phase 1: 64 px", "phase2": "phase 2: 128 px, from phase 1"}[phase])
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("mean squared error")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(folder / "loss.png")
    plt.close(figure)


def render(folder: Path, metrics: dict[str, Any]) -> str:
    """The page; its pictures are inside it."""
    adherence, encoding = metrics["adherence"], EncodingRecord.load(open_store(folder / "latents"))
    text = encoding.texts[ONLY_TEXT]
    headline = {
        "show the colour asked for": f"{adherence['colour']:.0%}",
        "show the shape asked for": f"{adherence['shape']:.0%}",
        "pictures in": f"{metrics['images_in']:,}",
        "accepted": f"{metrics['accepted']:,}",
        "minutes, all steps": f"{metrics['seconds']['total'] / 60:.1f}",
    }
    page = Template(TEMPLATE.read_text())
    return page.substitute(
        figures="".join(f'<div class="figure"><b>{v}</b><span>{k}</span></div>' for k, v in headline.items()),
        samples_png=embed(folder / "samples.png"),
        loss_png=embed(folder / "loss.png"),
        scores=table(["judged by plain geometry on the pixels", "colour", "shape", "samples"], score_rows(adherence)),
        steps=table(["step", "time", "throughput"], step_rows(metrics)),
        pictures=table(
            ["", "pictures"],
            [
                ["in the tars", metrics["images_in"]],
                ["accepted", metrics["accepted"]],
                ["rejected", metrics["rejected"]],
            ],
        ),
        rejects=table(["rejected because", "pictures"], [list(row) for row in metrics["rejected_by_reason"].items()]),
        buckets=table(
            ["bucket", "samples", "bytes per sample on disk"],
            [[name, f["samples"], f["bytes_per_sample"]] for name, f in metrics["buckets"].items()],
        ),
        encoding_id=encoding.id,
        encoding_text=f"{encoding.image.num_planes} planes of {encoding.image.posterior} in float16, "
        f"{text.length} × {text.width} text latents in {text.storage}.",
        steps1=f"{metrics['steps']['phase1']:,}",
        steps2=f"{metrics['steps']['phase2']:,}",
    )


def score_rows(adherence: dict[str, Any]) -> list[list[Any]]:
    """A row per phase and prompt list."""
    judged = {
        "phase 1, seen combinations": adherence["phase1"]["seen"],
        "phase 1, held-out combinations": adherence["phase1"]["held_out"],
        "phase 2, seen combinations": adherence,
        "phase 2, held-out combinations": adherence["held_out"],
    }
    return [[name, f"{s['colour']:.1%}", f"{s['shape']:.1%}", s["samples"]] for name, s in judged.items()]


def step_rows(metrics: dict[str, Any]) -> list[list[str]]:
    """A row per step of the demo: how long, and how fast where pictures went through."""
    titles = {
        "world": "draw the pictures",
        "download": "download (img2dataset)",
        "precompute": "stage 1: precompute",
        "phase1": "stage 2: phase 1",
        "phase2": "stage 2: phase 2",
        "samples": "sample and judge",
    }
    speeds = {"precompute": metrics["precompute_images_per_second"], **metrics["train_images_per_second"]}
    return [
        [title, f"{metrics['seconds'][name]:.0f} s", f"{speeds[name]:,.0f} img/s" if name in speeds else ""]
        for name, title in titles.items()
    ]


def table(header: list[str], rows: list[list[Any]]) -> str:
    """An HTML table; numbers with thousands separators."""

    def cell(value: Any) -> str:
        return f"{value:,}" if isinstance(value, int) else html.escape(str(value))

    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def embed(path: Path) -> str:
    """A PNG as a data address."""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def print_table(folder: Path, metrics: dict[str, Any]) -> None:
    """The demo in a few lines."""
    adherence = metrics["adherence"]
    rows = [
        (
            "pictures in / accepted / rejected",
            f"{metrics['images_in']} / {metrics['accepted']} / {metrics['rejected']}",
        ),
        ("rejected by reason", ", ".join(f"{reason} {n}" for reason, n in metrics["rejected_by_reason"].items())),
        (
            "samples stored",
            ", ".join(f"{b} {f['samples']} ({f['bytes_per_sample']} B)" for b, f in metrics["buckets"].items()),
        ),
        ("stage 1", f"{metrics['precompute_images_per_second']} img/s"),
        ("stage 2", ", ".join(f"{phase} {speed} img/s" for phase, speed in metrics["train_images_per_second"].items())),
        ("colour as asked", f"{adherence['colour']:.1%} (held-out combinations {adherence['held_out']['colour']:.1%})"),
        ("shape as asked", f"{adherence['shape']:.1%} (held-out combinations {adherence['held_out']['shape']:.1%})"),
        ("time", f"{metrics['seconds']['total'] / 60:.1f} min"),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in rows))
    print(f"\n  open {folder}/report.html; the samples are in {folder}/samples.png")
