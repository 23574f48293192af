"""Text comparison of several plans: the config fields that differ, and the results."""

from collections.abc import Callable
from typing import Any

from plan.config import Plan
from plan.output.text import star_marks
from plan.report import Report, Row
from shards.base.config import flatten
from shards.base.table import format_table

TOTALS: dict[str, tuple[str, Callable[[Report], str]]] = {
    "B per sample": ("size", lambda report: " + ".join(f"{bucket.sample_bytes:,.0f}" for bucket in report.buckets)),
    "latents TB": ("size", lambda report: f"{report.stored_tb:.1f}"),
    "latents per month": ("storage", lambda report: f"${report.price_per_month:,.0f}"),
    "read TB": ("size", lambda report: f"{report.traffic.read_tb:,.0f}"),
}
"""Rows of the totals table: the key in `DEPENDS_ON` that determines the star, and a function that formats the cell."""
BY_GPUS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "days": ("speed", lambda row: f"{row.training_days + row.precompute_days:.2f}"),
    "hours": ("speed", lambda row: f"{row.training_hours + row.precompute_hours:,.0f}"),
    "cost": ("cost", lambda row: f"${row.cost:,.0f}"),
}
"""Columns of the table by GPU count, in the same form as `TOTALS`."""


def render_comparison(plans: list[Plan], reports: list[Report]) -> str:
    """Compare plans in columns A, B, …: differing config fields, totals, and the GPU counts that all plans have."""
    names = [chr(ord("A") + number) for number in range(len(plans))]
    stars = [star_marks(report) for report in reports]
    different = [[f"  {field}", *map(str, values)] for field, values in differences(plans).items()]
    totals = [
        [f"  {title}", *(cell(report) + star[star_key] for report, star in zip(reports, stars, strict=True))]
        for title, (star_key, cell) in TOTALS.items()
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
            "Side by side (* depends on an assumed number)",
            format_table([["  differs in", *names], *(different or [["  nothing", *("" for _ in names)]])]),
            format_table([["  total", *names], *totals]),
            "Days and GPU-hours including precompute, GPU cost, and cost relative to A\n"
            + format_table([header, *lines]),
        ]
    )


def differences(plans: list[Plan]) -> dict[str, list[Any]]:
    """Return every config field that differs between plans, with its value in each plan."""
    flat = [flatten(plan.model_dump(mode="json")) for plan in plans]
    fields = {field: [values.get(field) for values in flat] for values in flat for field in values}
    return {field: values for field, values in fields.items() if any(value != values[0] for value in values)}
