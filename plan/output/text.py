"""The report as text. A star marks what rests on an assumed number, a tilde what is predicted from other GPUs."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from plan.arithmetic.costs import GIGA
from plan.facts import ASSUMED, Fact
from plan.latents import BucketReport
from plan.measured import Rate
from plan.report import Report, Row
from shards.base.table import format_table

T = TypeVar("T")
Columns = list[tuple[str, Callable[[T], str]]]
"""A title, and the cell of a row under it."""

MEGA, MINUTE = 1e6, 60
MARKS = {"measured": "", "predicted": "~", "assumed": "*"}
LEGEND = (
    "* rests on an assumed number, marked below   ~ predicted from a measurement on other GPUs and the bandwidths below"
)
RESTS_ON = {
    "encode": ("encode",),
    "speed": ("train", "encode"),
    "cost": ("gpu.price_per_hour", "train", "encode"),
    "failing": ("checkpoints.restart_seconds", "links.checkpoint_gbit", "checkpoints.gpu_hours_per_failure"),
    "reading": ("train", "data.string_bytes", "text.tokens", "data.picture_bytes"),
    "scaling": ("gpu.network_gbit_per_s", "links.efficiency", "links.data_gbit_per_node", "links.data_gbit_total"),
    "size": ("data.string_bytes", "text.tokens"),
    "storage": ("storage.price_per_tb_month",),
    "pays": ("storage.price_per_tb_month", "gpu.price_per_hour", "encode", "train"),
    "online": ("encode", "train", "data.picture_bytes"),
    "egress": ("regions.egress_per_gb",),
}
"""What is shown → the facts it rests on; `train` and `encode` stand for a speed from a utilisation."""


def render(report: Report) -> str:
    """Every part of the report, for a terminal of 120 columns."""
    stars = stars_of(report)
    parts = [
        f"{report.title} on {report.gpu}, encoding {report.encoding}\n{LEGEND}",
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


def table(rows: Iterable[T], columns: Columns[T]) -> str:
    """One line for each row, under the titles."""
    return format_table([[title for title, _ in columns], *([cell(row) for _, cell in columns] for row in rows)])


def stars_of(report: Report) -> dict[str, str]:
    """What is shown → `*` if one of the facts that it rests on is assumed."""
    assumed = {fact.field for fact in report.facts if fact.assumed}
    assumed |= {name.split()[0] for name, rate in report.rates.items() if rate.assumed}
    return {name: "*" if assumed & set(fields) else "" for name, fields in RESTS_ON.items()}


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


def _gpus(report: Report) -> tuple[str, Callable[[Row], str]]:
    """The first column; the number that was asked for is pointed out."""
    return "GPUs", lambda row: f"> {row.gpus}" if row.gpus == report.highlighted else str(row.gpus)


def _time_and_cost(report: Report, stars: dict[str, str]) -> str:
    columns = [_gpus(report)]
    for number, phase in enumerate(report.rows[0].phases):
        columns += _of_phase(number, phase.bucket)
    columns += [
        ("training", lambda row: _marked(row, f"{row.training_days:.2f}")),
        (f"precompute{stars['encode']}", lambda row: f"{row.precompute_days:.2f}"),
        (f"GPU-hours{stars['speed']}", lambda row: f"{row.training_hours + row.precompute_hours:,.0f}"),
        (f"cost{stars['cost']}", lambda row: f"${row.cost:,.0f}"),
        (f"all, failing{stars['failing']}", lambda row: f"{row.expected_days:.2f}"),
        (f"cost{stars['failing'] or stars['cost']}", lambda row: f"${row.expected_cost:,.0f}"),
    ]
    title = "Days, and cost of GPUs: uninterrupted, and with the failures to be expected\n"
    return title + table(report.rows, columns)


def _of_phase(number: int, bucket: str) -> Columns[Row]:
    return [
        (f"{bucket} img/s", lambda row: _marked(row, f"{row.phases[number].images_per_second:,.0f}", number)),
        ("days", lambda row: _marked(row, f"{row.phases[number].days:.2f}", number)),
    ]


def _marked(row: Row, text: str, phase: int | None = None) -> str:
    """With the mark of one phase, or of the row's least certain one."""
    phases = row.phases if phase is None else [row.phases[phase]]
    return MARKS[max((phase.basis for phase in phases), key=list(MARKS).index)] + text


def _machines(report: Report, stars: dict[str, str]) -> str:
    sizes, reading, failing, scaling = report.checkpoint_gb, stars["reading"], stars["failing"], stars["scaling"]
    columns: Columns[Row] = [
        _gpus(report),
        (f"MB/s per node{reading}", lambda row: f"{max(phase.read_per_node for phase in row.phases) / MEGA:,.0f}"),
        (f"GB/s in all{reading}", lambda row: f"{max(phase.read_total for phase in row.phases) / GIGA:.2f}"),
        (
            f"save every min{failing}",
            lambda row: " / ".join(f"{p.save_every_steps * p.step.total / MINUTE:.0f}" for p in row.phases),
        ),
        (f"lost{failing}", lambda row: f"{row.lost:.2%}"),
        (
            f"checkpoints TB{failing}",
            lambda row: f"{sum(p.num_checkpoints * gb / 1000 for p, gb in zip(row.phases, sizes, strict=True)):,.1f}",
        ),
        (f"per doubling{scaling}", lambda row: f"{row.speedup:.2f}x" if row.speedup else ""),
        (f"bound by{scaling}", lambda row: row.bottleneck),
    ]
    return "Reading (the busier phase), saving, failing, scaling\n" + table(report.rows, columns)


def _latents(report: Report, stars: dict[str, str]) -> str:
    size, price = stars["size"], stars["storage"]
    columns: Columns[BucketReport] = [
        ("  bucket", lambda bucket: f"  {bucket.bucket}"),
        ("samples", lambda bucket: f"{bucket.samples:,}"),
        (f"B per sample{size}", lambda bucket: f"{bucket.sample_bytes:,.0f}"),
        (f"TB{size}", lambda bucket: f"{bucket.stored_tb:.1f}"),
        (f"per month{price}", lambda bucket: f"${bucket.price_per_month:,.0f}"),
    ]
    checkpoints = ", ".join(f"{size:.1f}" for size in report.checkpoint_gb)
    return (
        f"Latents: {report.stored_tb:.1f} TB{size}, ${report.price_per_month:,.0f}{price} a month\n"
        f"{table(report.buckets, columns)}\n"
        f"Checkpoints: {checkpoints} GB each, {report.checkpoints_kept_tb:.2f} TB kept"
    )


def _online(report: Report, stars: dict[str, str]) -> str:
    price, rate = stars["pays"], stars["online"]
    row = next((row for row in report.rows if row.gpus == report.highlighted), report.rows[0])
    columns: Columns[BucketReport] = [
        ("  bucket", lambda bucket: f"  {bucket.bucket}"),
        ("passes", lambda bucket: f"{bucket.passes:.2f}"),
        (f"encoding once{price}", lambda bucket: f"${bucket.encode_cost:,.0f}"),
        (f"{report.months:g} months' storage{price}", lambda bucket: f"${bucket.storage_cost:,.0f}"),
        (f"pays from{price}", lambda bucket: f"{bucket.pays_from:.2f} passes"),
    ]
    return (
        f"Encoding online on {row.gpus} GPUs: training takes {row.online_ratio:.2f}x{rate} the time on latents, "
        f"{row.online_days:.2f} days{rate}, ${row.online_cost:,.0f}{price}.\n"
        f"Encoding beforehand pays for a bucket that training passes over more often than `pays from` says:\n"
        f"{table(report.buckets, columns)}"
    )


def _traffic(report: Report, stars: dict[str, str]) -> str:
    traffic, price = report.traffic, stars["egress"]
    text = f"Training reads {traffic.read_tb:,.0f} TB{stars['size']} if nothing is cached"
    if not traffic.foreign_tb:
        return f"{text}, none of it from another region."
    return (
        f"{text}, {traffic.foreign_tb:,.0f} TB of it from another region: ${traffic.cost:,.0f}{price}; "
        f"copying that share over once: ${traffic.copy_cost:,.0f}{price}."
    )


def _numbers(report: Report) -> str:
    rows = [
        (f"  {name}", f"{rate.images_per_second_per_gpu:,.1f}", "per second and GPU", _source(rate))
        for name, rate in report.rates.items()
    ]
    rows += [(f"  {fact.field}", f"{fact.value:,g}", fact.unit, _source(fact)) for fact in report.facts]
    return f"Numbers that this rests on\n{format_table(rows, '<><<')}"


def _source(number: Fact | Rate) -> str:
    if not number.assumed:
        return number.source
    return "* ASSUMED" if number.source == ASSUMED else f"* ASSUMED: {number.source}"
