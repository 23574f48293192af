"""How many rows came in, what each rule dropped, and what is left: funnel.json, and the same as text."""

from collections.abc import Sequence
from typing import Any

from precompute.select.filter.rules import Dropped, Rule
from precompute.select.filter.tally import SCORE_BIN, SIZE_BIN, Tally
from precompute.select.passes.filtering import FilteredFile
from precompute.select.passes.output import OutputFile


def build_funnel(
    rules: Sequence[Rule],
    filtered: Sequence[FilteredFile],
    global_drops: dict[str, tuple[str, int]],
    outputs: Sequence[OutputFile],
    selected: Tally,
) -> dict[str, Any]:
    """The content of funnel.json.

    Args:
        global_drops: name → (condition, rows dropped) of the rules that look at all rows together.
    """
    steps = [_step(rule.name, rule.condition, sum_of(file.dropped[rule.name] for file in filtered)) for rule in rules]
    steps += [_step(name, condition, Dropped(count)) for name, (condition, count) in global_drops.items()]
    rows_in = rows_left = sum(file.rows_in for file in filtered)
    for step in steps:
        rows_left -= step["by_value"] + step["no_value"]
        step["left"] = rows_left
    assert rows_left == selected.rows == sum(output.num_rows for output in outputs), "the funnel does not add up"
    before = Tally()
    for file in filtered:
        before += file.tally_in
    return {
        "rows_in": rows_in,
        "rules": steps,
        "rows_out": rows_left,
        "inputs": [{"name": file.source, "rows": file.rows_in, "passed_row_rules": file.rows_out} for file in filtered],
        "outputs": [{"name": output.name, "rows": output.num_rows} for output in outputs],
        "buckets": selected.buckets,
        "shorter_side": {"bin": SIZE_BIN, "in": before.sizes.tolist(), "out": selected.sizes.tolist()},
        "aesthetic": {"bin": SCORE_BIN, "in": before.scores.tolist(), "out": selected.scores.tolist()},
    }


def sum_of(counts: Any) -> Dropped:
    """All of `counts` together."""
    total = Dropped()
    for count in counts:
        total += count
    return total


def _step(name: str, condition: str, dropped: Dropped) -> dict[str, Any]:
    return {"rule": name, "keeps": condition, "by_value": dropped.by_value, "no_value": dropped.no_value}


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
