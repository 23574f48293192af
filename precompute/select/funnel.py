"""The selection funnel (input rows, rows dropped by each rule, rows left) as JSON, text and plot."""

import io
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from precompute.select.passes import FilteredFile, OutputFile
from precompute.select.rules import NUM_SCORE_BINS, NUM_SIZE_BINS, SCORE_BIN, SIZE_BIN, Rule
from shards.base.table import format_table

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


def build_funnel(
    rules: Sequence[Rule],
    filtered: Sequence[FilteredFile],
    global_drops: dict[str, tuple[str, int]],
    outputs: Sequence[OutputFile],
    selected: Counter[str],
    buckets: Sequence[str],
) -> dict[str, Any]:
    """Build the contents of funnel.json.

    Args:
        global_drops: rule name → (condition, number of dropped rows), for the rules that compare rows with each other
            or with the opt-out list.
        selected: `tally` of the selected rows.
    """
    counts = sum((file.counts for file in filtered), Counter[str]())
    steps = [_step(rule.name, rule.condition, *(counts[counter] for counter in rule.counters)) for rule in rules]
    steps += [_step(name, condition, count, 0) for name, (condition, count) in global_drops.items()]
    rows_in = rows_left = counts["rows"]
    for step in steps:
        rows_left -= step["by_value"] + step["no_value"]
        step["left"] = rows_left
    assert rows_left == selected["rows"] == sum(output.num_rows for output in outputs), (
        "the funnel's row counts are inconsistent"
    )
    return {
        "rows_in": rows_in,
        "rules": steps,
        "rows_out": rows_left,
        "inputs": [
            {"name": file.source, "rows": file.counts["rows"], "passed_row_rules": file.rows_out} for file in filtered
        ],
        "outputs": [{"name": output.name, "rows": output.num_rows} for output in outputs],
        "buckets": {name: selected[name] for name in buckets},
        "shorter_side": {"bin": SIZE_BIN} | _histograms("size", NUM_SIZE_BINS, counts, selected),
        "aesthetic": {"bin": SCORE_BIN} | _histograms("score", NUM_SCORE_BINS, counts, selected),
    }


def _step(name: str, condition: str, by_value: int, no_value: int) -> dict[str, Any]:
    return {"rule": name, "keeps": condition, "by_value": by_value, "no_value": no_value}


def _histograms(name: str, num_bins: int, before: Counter[str], after: Counter[str]) -> dict[str, list[int]]:
    bins = [f"{name} {number}" for number in range(num_bins)]
    return {"in": [before[key] for key in bins], "out": [after[key] for key in bins]}


def describe(funnel: dict[str, Any]) -> str:
    """Format the funnel as a text table for the terminal."""
    rows_in = funnel["rows_in"]
    rows = [["rule", "dropped", "no value", "left", "", "keeps"], ["rows in", "", "", f"{rows_in:,}", "100.0 %", ""]]
    for step in funnel["rules"]:
        counts = [f"{step[name]:,}" for name in ("by_value", "no_value", "left")]
        rows.append([step["rule"], *counts, _format_share(step["left"], rows_in), step["keeps"]])
    rows.append(["rows out", "", "", f"{funnel['rows_out']:,}", "", ""])
    lines = [format_table(rows, "<>>>><")]
    lines += [f"rows large enough for {name}: {count:,}" for name, count in funnel["buckets"].items()]
    return "\n".join(lines)


def draw_funnel(funnel: dict[str, Any]) -> bytes:
    """Render the funnel as a PNG: the rows left after each rule, histograms of sizes and scores before and after the
    selection, and the rows large enough for each bucket."""
    from matplotlib import rc_context  # imported here so that worker processes do not load it
    from matplotlib.figure import Figure

    num_bars = len(funnel["rules"]) + 1
    with rc_context(STYLE):
        figure = Figure(figsize=(10, 3.9 + 0.34 * num_bars), dpi=130, layout="constrained")
        top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=[0.9 + 0.34 * num_bars, 3.0]).flat
        _draw_steps(top.subplots(), funnel)
        sizes, scores, buckets = bottom.subplots(1, 3, width_ratios=[5, 5, 3])
        _draw_histogram(sizes, funnel["shorter_side"], "Shorter side, pixels", every=8)
        _draw_histogram(scores, funnel["aesthetic"], "Aesthetic score", every=8)
        _draw_buckets(buckets, funnel)
        target = io.BytesIO()
        figure.savefig(target, metadata={"Software": None}, bbox_inches="tight", pad_inches=0.15)
    return target.getvalue()


def _draw_steps(axes: Any, funnel: dict[str, Any]) -> None:
    rows_in = funnel["rows_in"]
    steps = [{"keeps": "rows in", "left": rows_in, "by_value": 0, "no_value": 0}, *funnel["rules"]]
    ends = np.zeros(len(steps), int)
    for name, label, alpha in (("left", None, 1), ("by_value", "dropped", 1), ("no_value", "dropped: no value", 0.45)):
        rows = [step[name] for step in steps]
        axes.barh(range(len(steps)), rows, left=ends, color=LOST if label else KEPT, alpha=alpha, label=label)
        ends += rows
    axes.text(rows_in * 1.01, 0, f"{rows_in:,}", va="center", fontweight="bold")
    for index, step in enumerate(steps[1:], 1):
        lost = ends[index] - step["left"]
        note = f"{step['left']:,}   " + (f"−{lost:,} ({_format_share(lost, rows_in)})" if lost else "none dropped")
        axes.text(ends[index] + rows_in * 0.01, index, note, va="center", color=INK if lost else MUTED)
    axes.set_yticks(range(len(steps)), [_shorten(step["keeps"]) for step in steps], color=INK)
    axes.set_xlim(0, rows_in * 1.3)
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.tick_params(left=False)
    selected = f"{funnel['rows_out']:,} selected ({_format_share(funnel['rows_out'], rows_in)})"
    axes.set_title(f"{rows_in:,} rows in, {selected}", fontsize=13, pad=2)
    # below the bars, because those at the bottom are long if most rows are selected
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0), borderaxespad=0, frameon=False, ncols=2)


def _draw_histogram(axes: Any, histogram: dict[str, Any], title: str, every: int) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    edges = [index * histogram["bin"] for index in range(len(histogram["in"]))]
    axes.bar(edges, histogram["in"], width=histogram["bin"], align="edge", color=PALE, label="rows in")
    axes.bar(edges, histogram["out"], width=histogram["bin"], align="edge", color=KEPT, label="selected")
    ticks = edges[::every]
    axes.set_xticks(ticks, [f"{tick:g}{'+' if tick == edges[-1] else ''}" for tick in ticks])
    axes.set_title(title)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))  # 1500000 → 1.5M
    axes.legend(frameon=False)


def _draw_buckets(axes: Any, funnel: dict[str, Any]) -> None:
    names, counts = list(funnel["buckets"]), list(funnel["buckets"].values())
    axes.bar_label(axes.bar(names, counts, color=KEPT, width=0.6), fmt="{:,.0f}")
    axes.set_ylim(0, max([*counts, 1]) * 1.15)
    axes.set_title("Rows large enough for each bucket")
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)


def _format_share(rows: int, total: int) -> str:
    """Format a share as a percentage. Only no rows are 0 %, and only all rows are 100 %."""
    percent = 100 * rows / max(total, 1)
    if 0 < percent < 0.1:
        return "< 0.1 %"
    return "> 99.9 %" if 99.9 < percent < 100 else f"{percent:.1f} %"


def _shorten(label: str) -> str:
    return label if len(label) <= 40 else f"{label[:39]}…"
