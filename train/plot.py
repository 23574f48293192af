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
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(steps, losses, color="#9ecae1", linewidth=1, label="loss")
    axes.plot(steps, smooth(losses, 0.9), color="#08519c", linewidth=1.8, label="smoothed (0.9)")
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
