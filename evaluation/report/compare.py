"""`evaluation compare`: the newest numbers of two runs, metric by metric, and only where they are of one metric."""

from evaluation.metrics.identity import check_comparable
from evaluation.report.runs import Run
from evaluation.scoring import Row
from shards.base.errors import RequestError


def compare(first: Run, second: Run) -> str:
    """For people: two lines for each metric id that both have.

    Raises:
        RequestError: they have a metric by name, and not by id; or no metric at all.
    """
    ours, theirs = newest(first), newest(second)
    lines = []
    for name in dict.fromkeys(row["metric"] for row in ours.values()):
        shared = [number for number, row in ours.items() if row["metric"] == name and number in theirs]
        others = [row for row in theirs.values() if row["metric"] == name]
        if others and not shared:
            check_comparable([next(row for row in ours.values() if row["metric"] == name), others[0]])
        for number in shared:
            lines.append(f"{name} {number} ({ours[number]['better']} is better), N {ours[number]['n']}")
            for run, rows in ((first, ours), (second, theirs)):
                lines.append(
                    "  {:<20} step {step:>8}  {value:10.4f}  [{low:.4f}, {high:.4f}]".format(run.name, **rows[number])
                )
    if not lines:
        which = [run.name for run, rows in ((first, ours), (second, theirs)) if not rows]
        raise RequestError(
            f"{first.name} and {second.name} have no metric in common{f': {which[0]} has none' if which else ''}. "
            f"Evaluate both under one config (`python -m evaluation watch RUN`)."
        )
    return "\n".join(lines)


def newest(run: Run) -> dict[str, Row]:
    """Metric id → its row of the latest step."""
    return {row["id"]: row for each in run.evaluations for row in each.rows}
