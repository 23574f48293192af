"""`python -m train plot RUN`: the loss curve as a picture."""

from pathlib import Path

from shards.errors import RequestError
from train.metrics import read_json_lines


def plot_run(run_dir: Path) -> Path:
    """Draw run_dir/loss.png from metrics.jsonl.

    Raises:
        RequestError: nothing was logged yet.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    rows = read_json_lines(run_dir / "metrics.jsonl")
    if not rows:
        raise RequestError(f"{run_dir}/metrics.jsonl is missing or empty: nothing was logged yet.")
    finite = [row for row in rows if row["loss"] is not None]
    steps, losses = [row["step"] for row in finite], [row["loss"] for row in finite]
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(steps, losses, color="#9ecae1", linewidth=1, label="loss")
    axes.plot(steps, smooth(losses, 0.9), color="#08519c", linewidth=1.8, label="smoothed (0.9)")
    validated = [row for row in rows if "val_loss" in row]
    if validated:
        xs, ys = [row["step"] for row in validated], [row["val_loss"] for row in validated]
        axes.plot(xs, ys, color="#b45309", marker="o", markersize=3, linewidth=1.2, label="validation")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean squared error")
    axes.set_title(str(run_dir))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    path = run_dir / "loss.png"
    figure.savefig(path)
    plt.close(figure)
    return path


def smooth(values: list[float], weight: float) -> list[float]:
    """Exponential smoothing without the bias of its start (as Adam corrects its moments)."""
    smoothed, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        smoothed.append(total / norm)
    return smoothed
