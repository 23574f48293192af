"""How many rows came in, what each rule dropped, and what is left: funnel.json, and the same as text."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from precompute.select.filter.rules import Rule
from precompute.select.filter.tally import NUM_SCORE_BINS, NUM_SIZE_BINS, SCORE_BIN, SIZE_BIN
from precompute.select.passes.filtering import FilteredFile
from precompute.select.passes.output import OutputFile


def build_funnel(
    rules: Sequence[Rule],
    filtered: Sequence[FilteredFile],
    global_drops: dict[str, tuple[str, int]],
    outputs: Sequence[OutputFile],
    selected: Counter[str],
    buckets: Sequence[str],
) -> dict[str, Any]:
    """The content of funnel.json.

    Args:
        global_drops: name → (condition, rows dropped) of the rules that look at all rows together.
        selected: the selected rows' `tally`.
    """
    counts = sum((file.counts for file in filtered), Counter[str]())
    steps = [_step(rule.name, rule.condition, *(counts[counter] for counter in rule.counters)) for rule in rules]
    steps += [_step(name, condition, count, 0) for name, (condition, count) in global_drops.items()]
    rows_in = rows_left = counts["rows"]
    for step in steps:
        rows_left -= step["by_value"] + step["no_value"]
        step["left"] = rows_left
    assert rows_left == selected["rows"] == sum(output.num_rows for output in outputs), "the funnel does not add up"
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
    """The funnel as a table for the terminal."""
    rows_in = funnel["rows_in"]
    lines = [f"{'rule':<14}{'dropped':>16}{'no value':>16}{'left':>16}{'':>9}  keeps"]
    lines.append(f"{'rows in':<14}{'':>16}{'':>16}{rows_in:>16,}{100:>8.1f} %")
    for step in funnel["rules"]:
        share = 100 * step["left"] / max(rows_in, 1)
        lines.append(
            f"{step['rule']:<14}{step['by_value']:>16,}{step['no_value']:>16,}{step['left']:>16,}{share:>8.1f} %  "
            f"{step['keeps']}"
        )
    lines.append(f"{'rows out':<14}{'':>16}{'':>16}{funnel['rows_out']:>16,}")
    lines += [f"large enough for {name}: {count:,}" for name, count in funnel["buckets"].items()]
    return "\n".join(lines)
