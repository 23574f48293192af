"""Plans side by side: what differs between them, and what comes of it."""

from collections.abc import Callable
from typing import Any

from plan.config import Plan
from plan.output.text import stars_of
from plan.report import Report, Row
from shards.base.config import flatten
from shards.base.table import format_table

TOTALS: dict[str, tuple[str, Callable[[Report], str]]] = {
    "B per sample": ("size", lambda report: " + ".join(f"{bucket.sample_bytes:,.0f}" for bucket in report.buckets)),
    "latents TB": ("size", lambda report: f"{report.stored_tb:.1f}"),
    "latents per month": ("storage", lambda report: f"${report.price_per_month:,.0f}"),
    "read TB": ("size", lambda report: f"{report.traffic.read_tb:,.0f}"),
}
"""Title → what its star depends on, and the cell of a plan."""
BY_GPUS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "days": ("speed", lambda row: f"{row.training_days + row.precompute_days:.2f}"),
    "hours": ("speed", lambda row: f"{row.training_hours + row.precompute_hours:,.0f}"),
    "cost": ("cost", lambda row: f"${row.cost:,.0f}"),
}


def render_comparison(plans: list[Plan], reports: list[Report]) -> str:
    """Plans as columns A, B, …: the fields in which they differ, then totals, then each number of GPUs they share."""
    names = [chr(ord("A") + number) for number in range(len(plans))]
    stars = [stars_of(report) for report in reports]
    different = [[f"  {field}", *map(str, values)] for field, values in differences(plans).items()]
    totals = [
        [f"  {title}", *(cell(report) + star[rests_on] for report, star in zip(reports, stars, strict=True))]
        for title, (rests_on, cell) in TOTALS.items()
    ]
    header = ["GPUs", *(f"{name} {what}" for what in BY_GPUS for name in names), *(f"{name} ÷ A" for name in names[1:])]
    by_gpus = [{row.gpus: row for row in report.rows} for report in reports]
    shared = [[rows[gpus] for rows in by_gpus] for gpus in sorted(set.intersection(*map(set, by_gpus)))]
    lines = [
        [
            str(rows[0].gpus),
            *(cell(row) + star[on] for on, cell in BY_GPUS.values() for row, star in zip(rows, stars, strict=True)),
            *(f"{row.cost / rows[0].cost:.2f}" for row in rows[1:]),
        ]
        for rows in shared
    ]
    return "\n\n".join(
        [
            "Side by side (* rests on an assumed number)",
            format_table([["  differs in", *names], *(different or [["  nothing", *("" for _ in names)]])]),
            format_table([["  total", *names], *totals]),
            "Days with precompute, GPU-hours, cost of GPUs, and costs by A's\n" + format_table([header, *lines]),
        ]
    )


def differences(plans: list[Plan]) -> dict[str, list[Any]]:
    """Field → its value in each plan, for every field that is not the same in all."""
    flat = [flatten(plan.model_dump(mode="json")) for plan in plans]
    fields = {field: [values.get(field) for values in flat] for values in flat for field in values}
    return {field: values for field, values in fields.items() if any(value != values[0] for value in values)}
