"""The report as text. A star marks what rests on an assumed number, a tilde what is predicted from other GPUs."""

from collections.abc import Iterable

from plan.report import Report, Row
from plan.rows import PhaseRow

MEGA, GIGA, MINUTE = 1e6, 1e9, 60
MARKS = {"measured": "", "predicted": "~", "assumed": "*"}
LEGEND = (
    "* rests on an assumed number, marked below   ~ predicted from a measurement on other GPUs and the bandwidths below"
)


def render(report: Report) -> str:
    """Every part of the report, for a terminal of 120 columns."""
    parts = [
        f"{report.title} on {report.gpu}, encoding {report.encoding}\n{LEGEND}",
        _time_and_cost(report),
        _machines(report),
        scaling_verdict(report),
        _latents(report),
        _online(report),
        _traffic(report),
        _numbers(report),
    ]
    if report.notes:
        parts.append("Notes\n" + "\n".join(f"  {note}" for note in report.notes))
    return "\n\n".join(part for part in parts if part) + "\n"


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """Right-aligned columns, two spaces apart."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def star(report: Report, *fields: str) -> str:
    """`*` if one of the facts `fields` is assumed; `train` and `encode` stand for a speed from a utilisation."""
    assumed = {fact.field for fact in report.facts if fact.assumed}
    assumed |= {name.split()[0] for name, rate in report.rates.items() if rate.assumed}
    return "*" if assumed & set(fields) else ""


def scaling_verdict(report: Report) -> str:
    """From which row on more GPUs no longer pay."""
    for before, row in zip(report.rows, report.rows[1:], strict=False):
        if row.speedup is not None and row.speedup < report.least_speedup:
            return (
                f"Scaling stops paying at {before.gpus} GPUs: on {row.gpus}, training is {row.speedup:.2f}x faster per "
                f"doubling (less than {report.least_speedup:g}x),\ncosts {row.cost / before.cost - 1:.0%} more, and is "
                f"bound by {row.bottleneck}."
            )
    most = report.rows[-1].gpus
    return f"Scaling pays up to {most} GPUs: each doubling makes training at least {report.least_speedup:g}x faster."


def gpus_of(report: Report, row: Row) -> str:
    """The row's number of GPUs, pointed out if it was asked for."""
    return f"> {row.gpus}" if row.gpus == report.highlighted else str(row.gpus)


def _time_and_cost(report: Report) -> str:
    price, encode = star(report, "gpu.price_per_hour", "train", "encode"), star(report, "encode")
    failures = star(report, "checkpoints.restart_seconds", "links.checkpoint_gbit", "checkpoints.gpu_hours_per_failure")
    header = ["GPUs"]
    header += [title for phase in report.rows[0].phases for title in (f"{phase.bucket} img/s", "days")]
    header += ["training", f"precompute{encode}", f"GPU-hours{star(report, 'train', 'encode')}", f"cost{price}"]
    header += [f"all, failing{failures}", f"cost{failures or price}"]
    return "Days, and cost of GPUs: uninterrupted, and with the failures to be expected\n" + table(
        header, (_time_cells(report, row) for row in report.rows)
    )


def _time_cells(report: Report, row: Row) -> list[str]:
    cells = [gpus_of(report, row)]
    for phase in row.phases:
        cells += [f"{MARKS[phase.basis]}{phase.images_per_second:,.0f}", f"{MARKS[phase.basis]}{phase.days:.2f}"]
    worst = max((phase.basis for phase in row.phases), key=list(MARKS).index)
    return [
        *cells,
        f"{MARKS[worst]}{row.training_days:.2f}",
        f"{row.precompute_days:.2f}",
        f"{row.training_hours + row.precompute_hours:,.0f}",
        f"${row.cost:,.0f}",
        f"{row.expected_days:.2f}",
        f"${row.expected_cost:,.0f}",
    ]


def _machines(report: Report) -> str:
    strings = star(report, "train", "data.string_bytes", "text.tokens", "data.picture_bytes")
    failures = star(report, "checkpoints.restart_seconds", "links.checkpoint_gbit", "checkpoints.gpu_hours_per_failure")
    bandwidths = ("gpu.network_gbit_per_s", "links.efficiency", "links.data_gbit_per_node", "links.data_gbit_total")
    header = ["GPUs", f"MB/s per node{strings}", f"GB/s in all{strings}", f"save every min{failures}"]
    header += [f"lost{failures}", f"checkpoints TB{failures}"]
    header += [f"{title}{star(report, *bandwidths)}" for title in ("per doubling", "bound by")]
    return "Reading (the busier phase), saving, failing, scaling\n" + table(
        header, (_machine_cells(report, row) for row in report.rows)
    )


def _machine_cells(report: Report, row: Row) -> list[str]:
    written = sum(
        phase.num_checkpoints * size / 1000 for phase, size in zip(row.phases, report.checkpoint_gb, strict=True)
    )
    return [
        gpus_of(report, row),
        f"{max(phase.read_per_node for phase in row.phases) / MEGA:,.0f}",
        f"{max(phase.read_total for phase in row.phases) / GIGA:.2f}",
        " / ".join(f"{_save_minutes(phase):.0f}" for phase in row.phases),
        f"{row.lost:.2%}",
        f"{written:,.1f}",
        f"{row.speedup:.2f}x" if row.speedup else "",
        row.bottleneck,
    ]


def _save_minutes(phase: PhaseRow) -> float:
    return phase.save_every_steps * phase.step.total / MINUTE


def _latents(report: Report) -> str:
    strings, price = star(report, "data.string_bytes", "text.tokens"), star(report, "storage.price_per_tb_month")
    rows = [
        [
            f"  {bucket.bucket}",
            f"{bucket.samples:,}",
            f"{bucket.sample_bytes:,.0f}",
            f"{bucket.stored_tb:.1f}",
            f"${bucket.price_per_month:,.0f}",
        ]
        for bucket in report.buckets
    ]
    header = ["  bucket", "samples", f"B per sample{strings}", f"TB{strings}", f"per month{price}"]
    checkpoints = ", ".join(f"{size:.1f}" for size in report.checkpoint_gb)
    return (
        f"Latents: {report.stored_tb:.1f} TB{strings}, ${report.price_per_month:,.0f}{price} a month\n"
        f"{table(header, rows)}\n"
        f"Checkpoints: {checkpoints} GB each, {report.checkpoints_kept_tb:.2f} TB kept"
    )


def _online(report: Report) -> str:
    price = star(report, "storage.price_per_tb_month", "gpu.price_per_hour", "encode", "train")
    rate = star(report, "encode", "train", "data.picture_bytes")
    row = next((row for row in report.rows if row.gpus == report.highlighted), report.rows[0])
    rows = [
        [
            f"  {bucket.bucket}",
            f"{bucket.passes:.2f}",
            f"${bucket.encode_cost:,.0f}",
            f"${bucket.storage_cost:,.0f}",
            f"{bucket.pays_from:.2f} passes",
        ]
        for bucket in report.buckets
    ]
    header = [
        "  bucket",
        "passes",
        f"encoding once{price}",
        f"{report.months:g} months' storage{price}",
        f"pays from{price}",
    ]
    return (
        f"Encoding online on {row.gpus} GPUs: training takes {row.online_ratio:.2f}x{rate} the time on latents, "
        f"{row.online_days:.2f} days{rate}, ${row.online_cost:,.0f}{price}.\n"
        f"Encoding beforehand pays for a bucket that training passes over more often than `pays from` says:\n"
        f"{table(header, rows)}"
    )


def _traffic(report: Report) -> str:
    traffic = report.traffic
    size = star(report, "data.string_bytes", "text.tokens")
    text = f"Training reads {traffic.read_tb:,.0f} TB{size} if nothing is cached"
    if not traffic.foreign_tb:
        return f"{text}, none of it from another region."
    price = star(report, "regions.egress_per_gb")
    return (
        f"{text}, {traffic.foreign_tb:,.0f} TB of it from another region: ${traffic.cost:,.0f}{price}; "
        f"copying that share over once: ${traffic.copy_cost:,.0f}{price}."
    )


def _numbers(report: Report) -> str:
    rows = [
        [f"  {name}", f"{rate.images_per_second_per_gpu:,.1f}", "per second and GPU", _known(rate.assumed, rate.source)]
        for name, rate in report.rates.items()
    ]
    rows += [
        [f"  {fact.field}", f"{fact.value:,g}", fact.unit, _known(fact.assumed, fact.source)] for fact in report.facts
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{name.ljust(widths[0])}  {value.rjust(widths[1])}  {unit.ljust(widths[2])}  {source}"
        for name, value, unit, source in rows
    ]
    return "Numbers that this rests on\n" + "\n".join(lines)


def _known(assumed: bool, source: str) -> str:
    if not assumed:
        return source
    return "* ASSUMED" if source == "assumed" else f"* ASSUMED: {source}"
