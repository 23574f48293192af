"""Figure for one or more reports: throughput by GPU count (top) and cost by duration (bottom), one column per plan."""

import io
import textwrap
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from plan.report import Report

COLOURS = ("#1b6ca8", "#d1662b")
MARKERS = {"compute": "o", "traffic between GPUs": "^", "data rate": "s"}
GREY = "#666666"
FOOTER_WIDTH = 78
MAX_DENSE_TICKS = 1e4
"""Ratio of the longest to the shortest duration up to which labels at 1, 2 and 5 times each power of ten fit."""


def draw(reports: list[Report]) -> bytes:
    """Draw the reports as a PNG. Measured points are filled, predicted ones hollow. A footer lists assumed inputs."""
    columns = len(reports)
    settings: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with rc_context(settings):
        figure = Figure(figsize=(max(6.0, 5.0 * columns), 9.2))
        axes = figure.subplots(2, columns, sharex="row", sharey="row", squeeze=False)
        for column, report in enumerate(reports):
            _throughput(axes[0][column], report)
            _cost(axes[1][column], report)
        # the columns share their axes, so limits and ticks must cover all plans
        counts = sorted({row.gpus for report in reports for row in report.rows})
        axes[0][0].set_xticks(counts, [str(count) for count in counts])
        axes[1][0].set_ylim(bottom=0)
        first, last = axes[1][0].get_xlim()
        dense = last / first < MAX_DENSE_TICKS
        axes[1][0].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if dense else (1,)))
        axes[0][0].set_ylabel("images per second")
        axes[1][0].set_ylabel("GPU cost including precompute ($1000)")
        _legends(axes[0][0], axes[1][0], reports)
        figure.tight_layout(rect=(0, 0.15, 1, 1), h_pad=2)
        for column, report in enumerate(reports):
            left = axes[1][column].get_position().x0
            figure.text(left, 0.145, _footer(report), fontsize=6.5, va="top", linespacing=1.35, color="#333333")
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def _throughput(axes: Axes, report: Report) -> None:
    gpus = [row.gpus for row in report.rows]
    for number, (first, colour) in enumerate(zip(report.rows[0].phases, COLOURS, strict=False)):
        phases = [row.phases[number] for row in report.rows]
        perfect = [first.images_per_second * count / gpus[0] for count in gpus]
        axes.plot(gpus, perfect, ":", color=colour, alpha=0.6, linewidth=1)
        axes.plot(gpus, [phase.predicted_images_per_second for phase in phases], "--", color=colour, linewidth=1.2)
        for count, phase in zip(gpus, phases, strict=True):
            measured = phase.basis == "measured"
            style = {"marker": "o", "markersize": 6.5} if measured else {"marker": MARKERS[phase.bottleneck]}
            face = colour if measured else "white"
            axes.plot(count, phase.images_per_second, color=colour, markerfacecolor=face, zorder=3, **style)
        speed = "assumed utilisation" if first.basis == "assumed" else f"{first.source.split()[0]} speeds"
        _annotate(axes, 0.03, 0.97 - 0.06 * number, f"{first.bucket}, {speed}", color=colour)
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="GPUs")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(True, which="major", alpha=0.25)
    title = f"{report.plan.title} on {report.plan.gpu.kind}"
    axes.set_title(title.replace("$", r"\$"), fontsize=10.5)  # matplotlib would parse text between dollar signs as math
    if report.plan.gpus:
        axes.axvline(report.plan.gpus, color=GREY, linewidth=0.8, alpha=0.6)


def _cost(axes: Axes, report: Report) -> None:
    days = [row.training_days + row.precompute_days for row in report.rows]
    costs = [row.cost / 1000 for row in report.rows]
    axes.plot(days, costs, "-", color=GREY, linewidth=1)
    for x, y, row in zip(days, costs, report.rows, strict=True):
        measured = all(phase.basis == "measured" for phase in row.phases)
        axes.plot(x, y, "o", color="black", markerfacecolor="black" if measured else "white", zorder=3)
        bold: Any = "bold" if row.gpus == report.plan.gpus else "normal"
        axes.annotate(str(row.gpus), (x, y), xytext=(3, 6), textcoords="offset points", fontsize=8, fontweight=bold)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.15)
    axes.grid(True, which="major", alpha=0.25)
    axes.set_xlabel("days, including precompute")
    price = next(fact for fact in report.facts if fact.field == "gpu.price_per_hour")
    text = f"\\${price.value:g} per GPU-hour{', assumed' if price.assumed else ''}"
    _annotate(axes, 0.97, 0.97, text, color=GREY, ha="right")


def _annotate(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    axes.text(x, y, text, fontsize=8.5, va="top", transform=axes.transAxes, **style)


def _legends(throughput: Axes, cost: Axes, reports: list[Report]) -> None:
    phases = [phase for report in reports for row in report.rows for phase in row.phases]
    entries = [
        _legend_entry("perfect scaling", ":", None),
        _legend_entry("predicted", "--", None),
    ]
    if any(phase.basis == "measured" for phase in phases):
        entries.append(_legend_entry("measured", "", "o", filled=True))
    bounds = {phase.bottleneck for phase in phases if phase.basis != "measured"}
    entries += [
        _legend_entry(f"predicted, bound by {name}", "", marker) for name, marker in MARKERS.items() if name in bounds
    ]
    throughput.legend(handles=entries, loc="lower right", fontsize=7.5, framealpha=0.9)
    points = [_legend_entry("predicted (number: GPUs)", "", "o")]
    if any(all(phase.basis == "measured" for phase in row.phases) for report in reports for row in report.rows):
        points.insert(0, _legend_entry("training measured (number: GPUs)", "", "o", filled=True))
    cost.legend(handles=points, loc="lower left", fontsize=7.5)


def _legend_entry(label: str, line: Any, marker: str | None, filled: bool = False) -> Line2D:
    face = GREY if filled else "white"
    return Line2D([], [], linestyle=line, marker=marker, color=GREY, markerfacecolor=face, label=label)


def _footer(report: Report) -> str:
    assumed_rates = [name for name, rate in report.rates.items() if rate.assumed]
    assumed = [f"{fact.field} {fact.value:,g} {fact.unit}" for fact in report.facts if fact.assumed]
    if assumed_rates:
        assumed.append(f"speeds follow from an assumed utilisation: {', '.join(assumed_rates)}")
    text = "Assumed: " + "; ".join(assumed or ["nothing"]) + "."
    return textwrap.fill(text.replace("$", r"\$"), FOOTER_WIDTH)
