"""The funnel as a picture: rows left after each rule, and what the rows look like before and after."""

import io
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

INK, MUTED, PALE, LOST, KEPT = "#1f2933", "#6b7785", "#dde3ea", "#e07a5f", "#2a6f97"
STYLE: Any = {
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


def draw_funnel(funnel: dict[str, Any]) -> bytes:
    """The funnel as a PNG."""
    num_bars = len(funnel["rules"]) + 1
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(10, 3.9 + 0.34 * num_bars), dpi=130, layout="constrained")
        top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=[0.9 + 0.34 * num_bars, 3.0]).flat
        _draw_steps(top.subplots(), funnel)
        sizes, scores, buckets = bottom.subplots(1, 3, width_ratios=[5, 5, 3])
        _draw_histogram(sizes, funnel["shorter_side"], "Shorter side, pixels", every=8)
        _draw_histogram(scores, funnel["aesthetic"], "Aesthetic score", every=8)
        _draw_buckets(buckets, funnel)
        target = io.BytesIO()
        figure.savefig(target, metadata={"Software": None}, bbox_inches="tight", pad_inches=0.15)
        plt.close(figure)
    return target.getvalue()


def _draw_steps(axes: Axes, funnel: dict[str, Any]) -> None:
    rows_in = max(funnel["rows_in"], 1)
    axes.barh(0, rows_in, color=KEPT)
    axes.text(rows_in * 1.01, 0, f"{funnel['rows_in']:,}", va="center", fontweight="bold")
    for place, step in enumerate(funnel["rules"], 1):
        lost = step["by_value"] + step["no_value"]
        axes.barh(place, step["left"], color=KEPT)
        axes.barh(place, step["by_value"], left=step["left"], color=LOST)
        axes.barh(place, step["no_value"], left=step["left"] + step["by_value"], color=LOST, alpha=0.45)
        note = f"{step['left']:,}   " + (f"−{lost:,} ({_share(lost, rows_in)})" if lost else "none dropped")
        axes.text((step["left"] + lost) + rows_in * 0.01, place, note, va="center", color=INK if lost else MUTED)
    labels = ["rows in", *(_shorten(step["keeps"]) for step in funnel["rules"])]
    axes.set_yticks(range(len(labels)), labels, color=INK)
    axes.set_xlim(0, rows_in * 1.3)
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.tick_params(left=False)
    selected = f"{funnel['rows_out']:,} selected ({_share(funnel['rows_out'], rows_in)})"
    axes.set_title(f"{funnel['rows_in']:,} rows in, {selected}", fontsize=13, pad=2)
    colours = [plt.Rectangle((0, 0), 1, 1, color=LOST), plt.Rectangle((0, 0), 1, 1, color=LOST, alpha=0.45)]
    axes.legend(colours, ["dropped", "dropped: no value"], loc="lower right", frameon=False, ncols=2)


def _draw_histogram(axes: Axes, histogram: dict[str, Any], title: str, every: int) -> None:
    edges = [index * histogram["bin"] for index in range(len(histogram["in"]))]
    axes.bar(edges, histogram["in"], width=histogram["bin"], align="edge", color=PALE, label="rows in")
    axes.bar(edges, histogram["out"], width=histogram["bin"], align="edge", color=KEPT, label="selected")
    ticks = edges[::every]
    axes.set_xticks(ticks, [f"{tick:g}{'+' if tick == edges[-1] else ''}" for tick in ticks])
    axes.set_title(title)
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    axes.legend(frameon=False)


def _draw_buckets(axes: Axes, funnel: dict[str, Any]) -> None:
    names, counts = list(funnel["buckets"]), list(funnel["buckets"].values())
    axes.bar(names, counts, color=KEPT, width=0.6)
    for place, count in enumerate(counts):
        axes.text(place, count, f"{count:,}", ha="center", va="bottom")
    axes.set_ylim(0, max([*counts, 1]) * 1.15)
    axes.set_title("Large enough for a bucket")
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)


def _share(rows: int, of: int) -> str:
    percent = 100 * rows / of
    return f"{percent:.1f} %" if percent >= 0.1 or not rows else "< 0.1 %"


def _shorten(label: str) -> str:
    return label if len(label) <= 40 else f"{label[:39]}…"


def _short(value: float, _: int) -> str:
    """1500000 → 1.5M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
