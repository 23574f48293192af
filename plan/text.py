"""Text form of a report. `*` marks values that depend on an assumed number; `~` marks predictions from a different GPU
count or batch size."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from plan.arithmetic.costs import GIGA
from plan.config import ASSUMED, Fact, Plan
from plan.measured import Rate
from plan.report import BucketReport, Report, Row
from shards.base.config import flatten
from shards.base.table import counted, format_table

T = TypeVar("T")
Columns = list[tuple[str, Callable[[T], str]]]
"""Columns of a table: each has a title and a function that formats a row's cell."""

MEGA, MINUTE = 1e6, 60
MARKS = {"measured": "", "predicted": "~", "assumed": "*"}
LEGEND = "* depends on an assumed number (see below)   ~ predicted from another GPU count or batch size"
DEPENDS_ON = {
    "encode": ("encode",),
    "speed": ("train", "encode"),
    "cost": ("gpu.price_per_hour", "train", "encode"),
    "failing": ("checkpoints.restart_seconds", "links.checkpoint_gbit", "checkpoints.gpu_hours_per_failure"),
    "reading": ("train", "data.string_bytes", "text.tokens", "data.picture_bytes"),
    "scaling": (
        "gpu.link_gb_per_s",
        "gpu.network_gbit_per_s",
        "links.efficiency",
        "links.data_gbit_per_node",
        "links.data_gbit_total",
    ),
    "size": ("data.string_bytes", "text.tokens"),
    "storage": ("storage.price_per_tb_month",),
    "pays": ("storage.price_per_tb_month", "gpu.price_per_hour", "encode", "train"),
    "online": ("encode", "train", "data.picture_bytes"),
    "egress": ("regions.egress_per_gb",),
}
"""Inputs that each group of values depends on. `train` and `encode` stand for the rates of training and encoding."""


def render(report: Report) -> str:
    """Render all sections of the report for a terminal of about 120 columns."""
    stars = star_marks(report)
    plan = report.plan
    heading = f"{plan.title} on {plan.gpu.kind}, encoding {plan.encoding}"
    parts = [
        f"{', '.join(filter(None, [heading, report.sharding]))}\n{LEGEND}",
        _time_and_cost(report, stars),
        _machines(report, stars),
        scaling_verdict(report),
        _latents(report, stars),
        _online(report, stars),
        _traffic(report, stars),
        _numbers(report),
    ]
    if report.notes:
        parts.append("Notes\n" + "\n".join(f"  {note}" for note in report.notes))
    return "\n\n".join(parts) + "\n"


def rounded(value: float, places: int) -> str:
    """Format a number with that many decimal places, or with two significant digits if it would be rounded to 0."""
    text = f"{value:,.{places}f}"
    return text if not value or float(text.replace(",", "")) else f"{value:.2g}"


def table(rows: Iterable[T], columns: Columns[T]) -> str:
    """Format rows as an aligned table with a header line."""
    return format_table([[title for title, _ in columns], *([cell(row) for _, cell in columns] for row in rows)])


def star_marks(report: Report) -> dict[str, str]:
    """Return `*` for each key of `DEPENDS_ON` that has an assumed input, and an empty string for the others."""
    assumed = {fact.field for fact in report.facts if fact.assumed}
    assumed |= {name.split()[0] for name, rate in report.rates.items() if rate.assumed}
    return {name: "*" if assumed & set(fields) else "" for name, fields in DEPENDS_ON.items()}


def scaling_verdict(report: Report) -> str:
    """Name the GPU count beyond which more GPUs are not worth their cost."""
    for before, row in zip(report.rows, report.rows[1:], strict=False):
        if row.speedup is not None and row.speedup < report.plan.least_speedup:
            return (
                f"Scaling stops paying off at {counted(before.gpus, 'GPU')}: on {row.gpus}, the speedup per doubling "
                f"is {row.speedup:.2f}x (below {report.plan.least_speedup:g}x),\nthe GPU-hours are "
                f"{row.gpu_hours / before.gpu_hours - 1:.0%} higher, and the bottleneck is {row.bottleneck}."
            )
    most = report.rows[-1].gpus
    if len(report.rows) == 1:
        return f"The plan is for {counted(most, 'GPU')} only, so it does not show how training scales."
    speedup = f"the speedup per doubling is at least {report.plan.least_speedup:g}x"
    return f"Scaling pays off up to {counted(most, 'GPU')}: {speedup}."


def _gpus(report: Report) -> tuple[str, Callable[[Row], str]]:
    """Return the first column, which highlights the requested GPU count."""
    return "GPUs", lambda row: f"> {row.gpus}" if row.gpus == report.plan.gpus else str(row.gpus)


def _time_and_cost(report: Report, stars: dict[str, str]) -> str:
    columns = [_gpus(report)]
    for number, phase in enumerate(report.rows[0].phases):
        columns += _phase_columns(number, phase.bucket)
    columns += [
        ("training", lambda row: _marked(row, rounded(row.training_days, 2))),
        (f"precompute{stars['encode']}", lambda row: rounded(row.precompute_days, 2)),
        (f"GPU-hours{stars['speed']}", lambda row: rounded(row.gpu_hours, 0)),
        (f"cost{stars['cost']}", lambda row: f"${rounded(row.cost, 0)}"),
        (f"with failures{stars['failing'] or stars['speed']}", lambda row: rounded(row.expected_days, 2)),
        (f"cost{stars['failing'] or stars['cost']}", lambda row: f"${rounded(row.expected_cost, 0)}"),
    ]
    title = "Days and GPU cost, uninterrupted and with expected failures\n"
    return title + table(report.rows, columns)


def _phase_columns(number: int, bucket: str) -> Columns[Row]:
    return [
        (f"{bucket} img/s", lambda row: _marked(row, rounded(row.phases[number].images_per_second, 0), number)),
        ("days", lambda row: _marked(row, rounded(row.phases[number].days, 2), number)),
    ]


def _marked(row: Row, text: str, phase: int | None = None) -> str:
    """Prefix `text` with the mark for the given phase or, if it is None, for the least certain phase in the row."""
    phases = row.phases if phase is None else [row.phases[phase]]
    return MARKS[max((phase.basis for phase in phases), key=list(MARKS).index)] + text


def _machines(report: Report, stars: dict[str, str]) -> str:
    sizes, reading, failing, scaling = report.checkpoint_gb, stars["reading"], stars["failing"], stars["scaling"]
    columns: Columns[Row] = [
        _gpus(report),
        (f"MB/s per node{reading}", lambda row: rounded(max(phase.read_per_node for phase in row.phases) / MEGA, 0)),
        (f"GB/s total{reading}", lambda row: rounded(max(phase.read_total for phase in row.phases) / GIGA, 2)),
        (
            f"min between saves{failing}",
            lambda row: " / ".join(rounded(p.save_every_steps * p.step.total / MINUTE, 0) for p in row.phases),
        ),
        (f"time lost{failing}", lambda row: f"{row.lost:.2%}"),
        (
            f"checkpoints TB{failing or stars['speed']}",
            lambda row: rounded(sum(p.num_checkpoints * gb / 1000 for p, gb in zip(row.phases, sizes, strict=True)), 1),
        ),
        (f"per doubling{scaling}", lambda row: f"{row.speedup:.2f}x" if row.speedup else ""),
        (f"bound by{scaling}", lambda row: row.bottleneck),
    ]
    return "Reading (busier phase), checkpoints, failures and scaling\n" + table(report.rows, columns)


def _latents(report: Report, stars: dict[str, str]) -> str:
    size, price = stars["size"], stars["storage"]
    columns: Columns[BucketReport] = [
        ("  bucket", lambda bucket: f"  {bucket.bucket}"),
        ("samples", lambda bucket: f"{bucket.samples:,}"),
        (f"B per sample{size}", lambda bucket: f"{bucket.sample_bytes:,.0f}"),
        (f"TB{size}", lambda bucket: rounded(bucket.stored_tb, 1)),
        (f"per month{price}", lambda bucket: f"${rounded(bucket.price_per_month, 0)}"),
    ]
    checkpoints = ", ".join(rounded(size, 1) for size in report.checkpoint_gb)
    settings = [[f"  text{size}", *(f"{bucket.bucket}, B per sample" for bucket in report.buckets)]]
    for setting in report.buckets[0].bytes_by_text_setting:
        settings.append(
            [f"  {setting}", *(f"{bucket.bytes_by_text_setting[setting]:,.0f}" for bucket in report.buckets)]
        )
    return (
        f"Latents: {rounded(report.stored_tb, 1)} TB{size}, ${rounded(report.price_per_month, 0)}{price} per month\n"
        f"{table(report.buckets, columns)}\n"
        f"{format_table(settings, '<' + '>' * len(report.buckets))}\n"
        f"Checkpoints: {checkpoints} GB each, {rounded(report.checkpoints_kept_tb, 2)} TB kept"
    )


def _online(report: Report, stars: dict[str, str]) -> str:
    price, rate = stars["pays"], stars["online"]
    row = next((row for row in report.rows if row.gpus == report.plan.gpus), report.rows[0])
    columns: Columns[BucketReport] = [
        ("  bucket", lambda bucket: f"  {bucket.bucket}"),
        ("passes", lambda bucket: rounded(bucket.passes, 2)),
        (f"precompute{price}", lambda bucket: f"${rounded(bucket.encode_cost, 0)}"),
        (f"storage ({report.plan.storage.months:g} mo){price}", lambda bucket: f"${rounded(bucket.storage_cost, 0)}"),
        (
            f"break-even{price}",
            lambda bucket: "never" if bucket.pays_from is None else f"{bucket.pays_from:.2f} passes",
        ),
    ]
    return (
        f"Encoding online on {counted(row.gpus, 'GPU')}: training takes {rounded(row.online_days, 2)} days{rate} "
        f"({row.online_ratio:.2f}x{rate} the time on precomputed latents) and costs "
        f"${rounded(row.online_cost, 0)}{price}.\n"
        f"Precomputing a bucket is cheaper than encoding it online if training makes more passes than `break-even`:\n"
        f"{table(report.buckets, columns)}"
    )


def _traffic(report: Report, stars: dict[str, str]) -> str:
    traffic, price = report.traffic, stars["egress"]
    text = f"Training reads {rounded(traffic.read_tb, 0)} TB{stars['size']} if nothing is cached"
    if not traffic.foreign_tb:
        return f"{text}, none of it from another region."
    return (
        f"{text}, {rounded(traffic.foreign_tb, 0)} TB of it from another region: ${rounded(traffic.cost, 0)}{price}; "
        f"copying that share once: ${rounded(traffic.copy_cost, 0)}{price}."
    )


def _numbers(report: Report) -> str:
    rows = [
        (f"  {name}", rounded(rate.images_per_second_per_gpu, 1), "per second per GPU", _source(rate))
        for name, rate in report.rates.items()
    ]
    rows += [(f"  {fact.field}", f"{fact.value:,g}", fact.unit, _source(fact)) for fact in report.facts]
    return f"Inputs and their sources\n{format_table(rows, '<><<')}"


def _source(number: Fact | Rate) -> str:
    if not number.assumed:
        return number.source
    return "* ASSUMED" if number.source == ASSUMED else f"* ASSUMED: {number.source}"


TOTALS: dict[str, tuple[str, Callable[[Report], str]]] = {
    "B per sample": ("size", lambda report: " + ".join(f"{bucket.sample_bytes:,.0f}" for bucket in report.buckets)),
    "latents TB": ("size", lambda report: rounded(report.stored_tb, 1)),
    "latents per month": ("storage", lambda report: f"${rounded(report.price_per_month, 0)}"),
    "read TB": ("size", lambda report: rounded(report.traffic.read_tb, 0)),
}
"""Rows of the totals table: title → (key in `DEPENDS_ON` that determines the star, function that formats a cell)."""
BY_GPUS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "days": ("speed", lambda row: rounded(row.training_days + row.precompute_days, 2)),
    "hours": ("speed", lambda row: rounded(row.gpu_hours, 0)),
    "cost": ("cost", lambda row: f"${rounded(row.cost, 0)}"),
}
"""Columns of the table by GPU count, in the same form as `TOTALS`."""


def render_comparison(reports: list[Report]) -> str:
    """Compare plans in columns A, B, …: config fields that differ, totals, and the GPU counts that all plans share."""
    names = [chr(ord("A") + number) for number in range(len(reports))]
    stars = [star_marks(report) for report in reports]
    different = [
        [f"  {field}", *map(str, values)] for field, values in differences([report.plan for report in reports]).items()
    ]
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
            *(
                f"{cell(row)}*" if star[on] else _marked(row, cell(row))
                for on, cell in BY_GPUS.values()
                for row, star in zip(rows, stars, strict=True)
            ),
            *(f"{row.cost / rows[0].cost:.2f}" if rows[0].cost else "-" for row in rows[1:]),
        ]
        for rows in shared
    ]
    return "\n\n".join(
        [
            "Side by side (* depends on an assumed number, ~ predicted from another GPU count or batch size)",
            format_table([["  differs in", *names], *(different or [["  nothing", *("" for _ in names)]])]),
            format_table([["  total", *names], *totals]),
            "Days and GPU-hours including precompute, GPU cost, and cost relative to A\n"
            + format_table([header, *lines])
            if lines
            else "No GPU count is in all plans, so days and costs cannot be compared. Set gpu_counts or gpus.",
        ]
    )


def differences(plans: list[Plan]) -> dict[str, list[Any]]:
    """Return every config field that differs between plans, with its value in each plan."""
    flat = [flatten(plan.model_dump(mode="json")) for plan in plans]
    fields = {field: [values.get(field) for values in flat] for values in flat for field in values}
    return {field: values for field, values in fields.items() if any(value != values[0] for value in values)}
