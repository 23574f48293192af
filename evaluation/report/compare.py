"""`python -m evaluation compare`: the newest metrics of two runs, compared only if their ids match."""

from evaluation.metrics.identity import check_comparable
from evaluation.report.runs import LoggedRun
from evaluation.scoring import Row
from shards.base.errors import RequestError


def compare(first: LoggedRun, second: LoggedRun) -> str:
    """Format each metric that both runs have, as a heading and one line per run.

    Raises:
        RequestError: a metric has different ids in the two runs, or the runs have no metric in common.
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
        without = [run.name for run, rows in ((first, ours), (second, theirs)) if not rows]
        reason = f": {' and '.join(without)} {'has' if len(without) == 1 else 'have'} none" if without else ""
        raise RequestError(
            f"{first.name} and {second.name} have no metric in common{reason}. "
            f"Evaluate both with the same config (`python -m evaluation watch RUN`)."
        )
    return "\n".join(lines)


def newest(run: LoggedRun) -> dict[str, Row]:
    """Return a dict from metric id to the metric at the latest step that has it."""
    return {row["id"]: row for evaluation in run.evaluations for row in evaluation.rows}
