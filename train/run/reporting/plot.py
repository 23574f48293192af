"""Plotting of loss.png: the loss and validation loss, the loss by quarter of the timesteps, and the learning rate."""

import argparse
from pathlib import Path

from shards.base.errors import RequestError
from train.run.reporting.json_lines import read_json_lines

QUARTER_COLORS = ("#1b9e77", "#7570b3", "#d95f02", "#e7298a")


def plot(arguments: list[str]) -> Path:
    """Draw RUN/loss.png from the run's metrics."""
    epilog = "example: python -m train plot runs/phase1"
    parser = argparse.ArgumentParser(prog="python -m train plot", description=plot.__doc__, epilog=epilog)
    parser.add_argument("run", type=Path, help="folder of the run")
    return plot_run(parser.parse_args(arguments).run)


def plot_run(run_dir: Path) -> Path:
    """Plot a run's metrics.jsonl to its loss.png, and return the path of the image.

    Raises:
        RequestError: there are no metrics yet.
    """
    from matplotlib.figure import Figure

    rows = read_json_lines(run_dir / "metrics.jsonl")
    if not rows:
        raise RequestError(
            f"{run_dir}/metrics.jsonl is missing or empty, so there is nothing to plot. Check the path of the run, or "
            f"wait until the run has written its first line, after log.every steps."
        )
    figure = Figure(figsize=(8, 9), dpi=120)
    loss_axes, quarter_axes, lr_axes = figure.subplots(3, 1, sharex=True, height_ratios=[4, 3, 1.5])
    figure.subplots_adjust(left=0.12, right=0.97, bottom=0.06, top=0.96, hspace=0.08)

    finite = [row for row in rows if row["loss"] is not None]
    steps, losses = [row["step"] for row in finite], [row["loss"] for row in finite]
    loss_axes.plot(steps, losses, color="#9ecae1", linewidth=1, label="loss")
    loss_axes.plot(steps, smooth(losses, 0.9), color="#08519c", linewidth=1.8, label="smoothed (0.9)")
    validated = [row for row in rows if "val_loss" in row]
    if validated:
        xs, ys = [row["step"] for row in validated], [row["val_loss"] for row in validated]
        loss_axes.plot(xs, ys, color="#b45309", marker="o", markersize=3, linewidth=1.2, label="validation")
    loss_axes.set(ylabel="mean squared error", title=str(run_dir))
    loss_axes.legend(frameon=False)

    for name, color in zip(rows[0]["loss_by_quarter"], QUARTER_COLORS, strict=False):
        drawn = [row for row in rows if row["loss_by_quarter"][name] is not None]
        values = smooth([row["loss_by_quarter"][name] for row in drawn], 0.9)
        quarter_axes.plot([row["step"] for row in drawn], values, color=color, label=f"timesteps {name}")
    quarter_axes.set_ylabel("by timestep, smoothed")
    quarter_axes.legend(frameon=False, ncols=2)

    lr_axes.plot([row["step"] for row in rows], [row["lr"] for row in rows], color="#555555", linewidth=1.2)
    lr_axes.set(ylabel="learning rate", xlabel="optimizer step")
    lr_axes.ticklabel_format(axis="y", scilimits=(-2, 2))

    for axes in (loss_axes, quarter_axes, lr_axes):
        axes.grid(alpha=0.3)
    path = run_dir / "loss.png"
    figure.savefig(path)
    return path


def smooth(values: list[float], weight: float) -> list[float]:
    """Smooth values with an exponential moving average, with Adam's correction for the bias toward the initial 0.

    Args:
        weight: weight of the previous average, from 0 (no smoothing) to below 1.
    """
    smoothed, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        smoothed.append(total / norm)
    return smoothed
