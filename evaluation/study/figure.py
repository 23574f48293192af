"""The chart in results.png: a bar with a 95 % interval per model and question, above the preference by category."""

import io
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

FILLS = ("#1f5fa8", "#e6a23c", "#5a9e6f", "#b65c8e", "#7a7a7a", "#8fc1e3")
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
"""Hatches and the letters below the bars distinguish the models without colour."""
WIDTH, BARS_HEIGHT = 9.0, 4.2
"""Width of the figure and height of its upper row, in inches."""


def draw(results: dict[str, Any]) -> bytes:
    """Draw the results as a PNG, with one column per question."""
    # with more than two models, there are too many pairs for one figure
    categories = sorted({row["category"] for row in results["by_category"]}) if len(results["models"]) == 2 else []
    heights = [BARS_HEIGHT, *([0.32 * len(categories) + 1.2] if categories else [])]
    figure = Figure(figsize=(WIDTH, sum(heights)), dpi=120, layout="constrained")
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    panels: list[Any] = [_bars, partial(_dots, categories=categories)]
    for part, panel in zip(parts[:, 0], panels, strict=False):
        axes = part.subplots(1, len(results["questions"]), sharey=True, squeeze=False)[0]
        for axis, question in zip(axes, results["questions"], strict=True):
            panel(axis, question, results)
        if panel is _bars:
            axes[0].set_ylabel("preferred (ties count as halves)")
    note = " (partial)" if results["partial"] else ""
    figure.suptitle(f"{plain(results['name'])}{note} (95 % intervals over raters and prompts)", fontsize=11)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def plain(text: str) -> str:
    """Escape dollar signs, because matplotlib would parse text between them as math."""
    return text.replace("$", r"\$")


def model_shares(results: dict[str, Any], question: str) -> dict[str, tuple[float, float, float]]:
    """Return a dict from model letter to the share of votes for that model and the two ends of its 95 % interval.

    With two models, the share is the preference over the other model. With more models, it is the mean probability of
    being preferred to each of the other models. The dict is empty if no votes on the question count.
    """
    if results["strengths"]:
        rows = [row for row in results["strengths"] if row["question"] == question]
        return {row["model"]: (row["share"], row["share_low"], row["share_high"]) for row in rows}
    row = next((row for row in results["preferences"] if row["question"] == question), None)
    if row is None:
        return {}
    a, b = row["models"]
    value, low, high = row["preference"], row["low"], row["high"]
    return {a: (value, low, high), b: (1 - value, 1 - high, 1 - low)}


def _bars(axis: Axes, question: str, results: dict[str, Any]) -> None:
    """Draw one bar per model, unless the question has no votes, and a grey band for the margin of equivalence."""
    shares = model_shares(results, question)
    if not shares:
        axis.text(0.5, 0.75, "no votes counted", transform=axis.transAxes, ha="center", fontsize=10)
    for number, letter in enumerate(shares):
        value, low, high = (100 * share for share in shares[letter])
        style = number % len(FILLS)
        axis.bar(number, value, 0.6, color=FILLS[style], hatch=HATCHES[style], edgecolor="#222222")
        axis.errorbar(number, value, [[value - low], [high - value]], color="black", capsize=7, linewidth=1.6)
        axis.text(number, high + 2, f"{value:.1f} %", ha="center", fontsize=10)
    axis.axhline(50, color="#444444", linewidth=1, linestyle="--")
    margin = 100 * results["margin"]
    axis.axhspan(50 - margin, 50 + margin, color="#e4e4e8", linewidth=0, zorder=0)
    axis.set_title(plain(results["questions"][question]), fontsize=10)
    axis.set_xticks(range(len(shares)), list(shares), fontsize=11)
    axis.set_ylim(0, 108)
    axis.set_yticks(range(0, 101, 25), [f"{share} %" for share in range(0, 101, 25)])


def _dots(axis: Axes, question: str, results: dict[str, Any], categories: list[str]) -> None:
    """Draw the preference for the first model, with its interval, in each category."""
    rows = {row["category"]: row for row in results["by_category"] if row["question"] == question}
    for place, category in enumerate(reversed(categories)):
        if row := rows.get(category):
            value, low, high = (100 * row[name] for name in ("preference", "low", "high"))
            axis.errorbar(value, place, xerr=[[value - low], [high - value]], fmt="o", color="#1f3b63", capsize=4)
    axis.axvline(50, color="#444444", linewidth=1, linestyle="--")
    axis.set_yticks(range(len(categories)), [plain(category) for category in reversed(categories)], fontsize=9)
    axis.set_xlim(0, 100)
    axis.set_xticks(range(25, 76, 25), [f"{share} %" for share in range(25, 76, 25)])
    axis.set_xlabel(f"{results['models'][0]['letter']} preferred")
