"""results.png: one bar per model and question with its 95 % interval, and below it the preference per category."""

import io
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

FILLS = ("#1f5fa8", "#e6a23c", "#5a9e6f", "#b65c8e", "#7a7a7a", "#8fc1e3")
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
"""Hatches and the letters below the bars distinguish the models without colour."""
WIDTH, BARS_HEIGHT = 9.0, 4.2
"""Size of the figure's upper row, in inches."""
Panel = Callable[[Axes, str, list[str], dict[str, Any]], None]


def draw(results: dict[str, Any]) -> bytes:
    """Draw the results as a PNG, with one column per question."""
    questions, letters = list(results["questions"]), [model["letter"] for model in results["models"]]
    categories = _categories(results)
    dots_height = 0.32 * len(categories) + 1.2 if categories else 0
    figure = Figure(figsize=(WIDTH, BARS_HEIGHT + dots_height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    rows: list[tuple[Panel, list[str], float]] = [(_bars, letters, BARS_HEIGHT)]
    if categories:
        rows.append((_dots, categories, dots_height))
    parts: Any = figure.subfigures(len(rows), 1, height_ratios=[height for *_, height in rows], squeeze=False)
    for part, (panel, names, _) in zip(parts[:, 0], rows, strict=True):
        axes = part.subplots(1, len(questions), sharey=True, squeeze=False)[0]
        for axis, question in zip(axes, questions, strict=True):
            panel(axis, question, names, results)
        if panel is _bars:
            axes[0].set_ylabel("preferred (ties count as halves)")
    partial = " (partial)" if results["partial"] else ""
    figure.suptitle(f"{plain(results['name'])}{partial} (95 % intervals over raters and prompts)", fontsize=11)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def plain(text: str) -> str:
    """Escape dollar signs, because matplotlib would parse text between them as math."""
    return text.replace("$", r"\$")


def model_shares(results: dict[str, Any], question: str) -> dict[str, tuple[float, float, float]]:
    """Return a dict from model letter to the share of votes for the model and the ends of its 95 % interval.

    With two models, the share is the preference over the other model. With more, it is the mean probability of being
    preferred to each of the others.
    """
    if results["strengths"]:
        rows = [row for row in results["strengths"] if row["question"] == question]
        return {row["model"]: (row["share"], row["share_low"], row["share_high"]) for row in rows}
    (row,) = (row for row in results["preferences"] if row["question"] == question)
    a, b = row["models"]
    value, low, high = row["preference"], row["low"], row["high"]
    return {a: (value, low, high), b: (1 - value, 1 - high, 1 - low)}


def _bars(axis: Axes, question: str, letters: list[str], results: dict[str, Any]) -> None:
    """Draw one bar per model, and the margin of equivalence as a grey band."""
    shares = model_shares(results, question)
    for number, letter in enumerate(letters):
        value, low, high = (100 * share for share in shares[letter])
        style = number % len(FILLS)
        axis.bar(number, value, 0.6, color=FILLS[style], hatch=HATCHES[style], edgecolor="#222222")
        axis.errorbar(number, value, [[value - low], [high - value]], color="black", capsize=7, linewidth=1.6)
        axis.text(number, high + 2, f"{value:.1f} %", ha="center", fontsize=10)
    axis.axhline(50, color="#444444", linewidth=1, linestyle="--")
    margin = 100 * results["margin"]
    axis.axhspan(50 - margin, 50 + margin, color="#e4e4e8", linewidth=0, zorder=0)
    axis.set_title(plain(results["questions"][question]), fontsize=10)
    axis.set_xticks(range(len(letters)), letters, fontsize=11)
    axis.set_ylim(0, 108)
    axis.set_yticks(range(0, 101, 25), [f"{share} %" for share in range(0, 101, 25)])


def _categories(results: dict[str, Any]) -> list[str]:
    """Return the categories to draw; more than two models have too many pairs for one figure, so none are drawn."""
    return [] if len(results["models"]) > 2 else sorted({row["category"] for row in results["by_category"]})


def _dots(axis: Axes, question: str, categories: list[str], results: dict[str, Any]) -> None:
    """Draw the preference for the first model in each category."""
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
