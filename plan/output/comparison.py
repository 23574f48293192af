"""Plans side by side: what differs between them, and what comes of it."""

from typing import Any

from plan.config import Plan
from plan.output.text import star, table
from plan.report import Report


def differences(plans: list[Plan]) -> dict[str, list[Any]]:
    """Field → its value in each plan, for every field that is not the same in all."""
    flat = [_flat(plan.model_dump(mode="json")) for plan in plans]
    fields = {field: None for values in flat for field in values}
    table = {field: [values.get(field) for values in flat] for field in fields}
    return {field: values for field, values in table.items() if any(value != values[0] for value in values)}


def render_comparison(plans: list[Plan], reports: list[Report]) -> str:
    """Plans as columns A, B, …: the fields in which they differ, then totals, then each number of GPUs they share."""
    names = [chr(ord("A") + number) for number in range(len(plans))]
    different = [[f"  {field}", *map(str, values)] for field, values in differences(plans).items()]
    totals = [
        ["  B per sample", *(_buckets(report) for report in reports)],
        ["  latents TB", *(f"{report.stored_tb:.1f}{_stored(report)}" for report in reports)],
        ["  latents per month", *(f"${report.price_per_month:,.0f}{_storage_price(report)}" for report in reports)],
        ["  read TB", *(f"{report.traffic.read_tb:,.0f}{_stored(report)}" for report in reports)],
    ]
    return "\n\n".join(
        [
            "Side by side (* rests on an assumed number)",
            table(["  differs in", *names], different or [["  nothing", *("" for _ in names)]]),
            table(["  total", *names], totals),
            _by_gpus(names, reports),
        ]
    )


def _by_gpus(names: list[str], reports: list[Report]) -> str:
    header = ["GPUs", *(f"{name} {what}" for what in ("days", "hours", "cost") for name in names)]
    header += [f"{name} ÷ A" for name in names[1:]]
    by_gpus = [{row.gpus: row for row in report.rows} for report in reports]
    lines = []
    for gpus in sorted(set.intersection(*(set(rows) for rows in by_gpus))):
        rows = [rows[gpus] for rows in by_gpus]
        stars = [star(report, "gpu.price_per_hour", "train", "encode") for report in reports]
        days = [row.training_days + row.precompute_days for row in rows]
        lines.append(
            [
                str(gpus),
                *(f"{value:.2f}{star(report, 'train', 'encode')}" for value, report in zip(days, reports, strict=True)),
                *(
                    f"{row.training_hours + row.precompute_hours:,.0f}{star(report, 'train', 'encode')}"
                    for row, report in zip(rows, reports, strict=True)
                ),
                *(f"${row.cost:,.0f}{mark}" for row, mark in zip(rows, stars, strict=True)),
                *(f"{row.cost / rows[0].cost:.2f}" for row in rows[1:]),
            ]
        )
    return "Days with precompute, GPU-hours, cost of GPUs, and costs by A's\n" + table(header, lines)


def _buckets(report: Report) -> str:
    return " + ".join(f"{bucket.sample_bytes:,.0f}" for bucket in report.buckets) + _stored(report)


def _stored(report: Report) -> str:
    return star(report, "data.string_bytes", "text.tokens")


def _storage_price(report: Report) -> str:
    return star(report, "storage.price_per_tb_month")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return flat
