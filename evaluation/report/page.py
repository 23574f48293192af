"""The report of one or more training runs: its sections, in order."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL.Image import Image
from pydantic import Field

from evaluation.metrics.table import Row
from evaluation.report.charts import Series, line_chart
from evaluation.report.markup import Section, macros, render_page, section
from evaluation.report.pictures import first_pictures, spread
from evaluation.report.runs import MAX_POINTS, Evaluation, LoggedRun, binned, step_offsets
from evaluation.sampling.prompts import Prompt
from shards.base.config import Config
from shards.base.errors import RequestError, WorkError
from shards.base.store import LocalPath, parse_place
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from shards.tools.stats import root_totals

TABLE_ROWS = 12
"""Maximum number of table rows for each line of a chart. If a line has more points, only evenly spaced ones are
listed."""


class ReportConfig(Config):
    """Write a report of training runs as a single HTML page."""

    output: LocalPath = Path("runs/report.html")
    """Path of the report."""
    price_per_hour: float | None = Field(None, ge=0)
    """Dollars per GPU hour (`plan/gpus.yaml` lists some prices); null: report only GPU hours."""
    prompts: int = Field(6, ge=0)
    """Number of prompts to show images for, taken from the start of each sample set."""
    checkpoints: int = Field(8, ge=2)
    """Maximum number of checkpoints to show images from. They are evenly spaced."""
    side: int = Field(160, ge=16)
    """Longer side of the images on the page, in pixels."""


def render(runs: Sequence[LoggedRun], config: ReportConfig, title: str, first: Sequence[Section] = ()) -> str:
    """Render the report. The sections in `first` come before the report's own sections."""
    contents = {
        "summary": ("At a glance", summary(runs)),
        "losses": ("Loss", losses(runs)),
        "metrics": ("Metrics", metrics(runs)),
        "pictures": ("Fixed prompts over the course of training", strips(runs, config)),
        "same-prompts": ("Runs side by side", same_prompts(runs, config)),
        "speed": ("Speed", speed(runs)),
        "cost": ("Cost", costs(runs, config.price_per_hour)),
        "data": ("Data", data(runs)),
    }
    own = [section(id, heading, *parts) for id, (heading, parts) in contents.items() if parts]
    return render_page(title, [*first, *own])


def summary(runs: Sequence[LoggedRun]) -> list[Markup]:
    """Tabulate the runs and their newest metrics."""
    rows = []
    for run in runs:
        last = [value for _, value in replace(run, log=run.log[-10:]).curve("loss")]  # none if training diverged
        loss = sum(last) / len(last) if last else None
        rows.append([run.name, run.steps, run.config["max_steps"], loss, str(run.place)])
    newest = [
        [run.name, row["metric"], row["value"], row["low"], row["high"], evaluation.step, row["n"], setting, row["id"]]
        for run in runs
        for setting, evaluation in _newest(run).items()
        for row in evaluation.rows
    ]
    header = ["run", "metric", "value", "95 % from", "to", "step", "N", "setting", "id"]
    metrics = macros.paragraph("No metrics yet. `python -m evaluation watch RUN` computes them.")
    if newest:
        metrics = macros.table("Newest metrics", header, newest)
    return [macros.table("Runs", ["run", "steps done", "of", "mean loss, last 10 lines", "folder"], rows), metrics]


def losses(runs: Sequence[LoggedRun]) -> list[Markup]:
    """Plot the training and validation losses. If a run was initialised from another run
    on the page, its curve starts at the step at which that run ended."""
    offsets = step_offsets(runs)
    lines = _curves(runs, "loss") + _curves(runs, "val_loss", " held out", len(runs))
    if not lines:
        return [macros.paragraph("Nothing has been logged yet.")]
    note = "Each point is the mean of consecutive log lines."
    if chained := [run.name for run in runs if offsets[run.name]]:
        names = ", ".join(chained)
        note += f" The curve of a run that was initialised from another run starts where that run ended: {names}."
    return [chart("Loss over steps", "optimizer steps", "mean squared error", lines, note, log=True)]


def metrics(runs: Sequence[LoggedRun]) -> list[Markup]:
    """Plot every metric id in a separate chart, because values with different ids cannot be compared."""
    by_id: dict[str, dict[str, list[Row]]] = {}
    settings: dict[str, str] = {}
    for run in runs:
        for evaluation in run.evaluations:
            name = run.name if evaluation.weights == "auto" else f"{run.name} {evaluation.weights}"
            for row in evaluation.rows:
                by_id.setdefault(row["id"], {}).setdefault(name, []).append(row)
                settings[row["id"]] = evaluation.setting
    if not by_id:
        return []
    names = list(dict.fromkeys([*(run.name for run in runs), *(name for named in by_id.values() for name in named)]))
    charts = []
    for number, named in by_id.items():
        lines = []
        for name, rows in named.items():
            points = [(float(row["step"] or 0), row["value"]) for row in rows]
            lines.append(Series(name, points, [(row["low"], row["high"]) for row in rows], names.index(name)))
        first = next(iter(named.values()))[0]
        reference = f" against {first['reference_n']:,}" if first["reference_n"] else ""
        note = (
            f"{first['better'].capitalize()} is better. N {first['n']:,}{reference}. "
            f"Bars: 95 % intervals of the {first['estimand']}."
        )
        title = f"{first['metric']}, {settings[number]}, id {number}"
        charts.append(chart(title, "checkpoint's step", first["metric"], lines, note))
    explanation = "A metric's id identifies its extractor, N, prompts, reference and sampler. Each chart shows one id."
    return [macros.paragraph(explanation), macros.columns(charts)]


def strips(runs: Sequence[LoggedRun], config: ReportConfig) -> list[Markup]:
    """Show how the images of fixed prompts, drawn from the same noise, change from checkpoint to checkpoint."""
    parts: list[Markup] = []
    for run in runs:
        for setting, its in _by_setting(run).items():
            rows: dict[Prompt, dict[str, Image]] = {}
            for evaluation in spread(its, config.checkpoints):
                for prompt, picture in first_pictures(evaluation.place, config.prompts, config.side).items():
                    rows.setdefault(prompt, {})[f"step {evaluation.step}"] = picture
            if rows:
                parts.append(macros.heading(f"{run.name}, {setting}"))
                parts.append(macros.columns([macros.image_row(prompt.text, row) for prompt, row in rows.items()]))
    return parts


def same_prompts(runs: Sequence[LoggedRun], config: ReportConfig) -> list[Markup]:
    """Show the runs' newest images side by side, for each prompt that several runs share."""
    rows: dict[Prompt, dict[str, Image]] = {}
    sharing: dict[Prompt, set[str]] = {}
    for run in runs:
        newest = _newest(run)
        for setting, evaluation in newest.items():
            label = f"{run.name}, step {evaluation.step}" + (f", {setting}" if len(newest) > 1 else "")
            for prompt, picture in first_pictures(evaluation.place, config.prompts, config.side).items():
                rows.setdefault(prompt, {})[label] = picture
                sharing.setdefault(prompt, set()).add(run.name)
    shared = [macros.image_row(prompt.text, row) for prompt, row in rows.items() if len(sharing[prompt]) > 1]
    return [macros.columns(shared)] if shared else []


def speed(runs: Sequence[LoggedRun]) -> list[Markup]:
    """Tabulate the runs' median speeds, and plot throughput and MFU over steps."""
    fields = ("images_per_second", "images_per_second_per_gpu", "mfu", "data_wait", "memory_gb")
    header = ["run", "images/s", "images/s per process", "MFU", "share of time waiting for data", "peak memory, GiB"]
    rows = [[run.name, *(run.median(field) for field in fields)] for run in runs]
    parts = [macros.table("Medians over the log", header, rows)]
    if not any(run.curve("mfu") for run in runs):
        unknown = "MFU is unknown: the device's peak throughput is not listed, and `log.peak_tflops` is not set."
        parts.append(macros.paragraph(unknown))
    charts = []
    series = (("images_per_second", "Images per second", "images per second"), ("mfu", "MFU", "MFU"))
    for field, title, name in series:
        if lines := _curves(runs, field, max_points=40):
            charts.append(chart(title, "optimizer steps", name, lines))
    return [*parts, macros.columns(charts)]


def costs(runs: Sequence[LoggedRun], price: float | None) -> list[Markup]:
    """Tabulate the hours spent on training steps and on evaluations, and what they cost."""
    rows: list[list[Any]] = []
    for run in runs:
        images = run.steps * run.config["global_batch_size"]
        rows.append([run.name, images, run.num_processes, run.seconds / 3600, run.gpu_hours])
        if run.evaluations:
            hours = sum(evaluation.seconds for evaluation in run.evaluations) / 3600
            rows.append([f"{run.name}, evaluations ({len(run.evaluations)})", None, None, None, hours])
    rows.append(["all", sum(row[1] or 0 for row in rows), None, None, sum(row[4] for row in rows)])
    rows = [[*row, None if price is None else f"${row[4] * price:,.2f}"] for row in rows]
    header = ["run", "images", "processes", "hours", "process hours", "dollars"]
    note = (
        "Training time is derived from the logged speed of each step. It excludes startup, validation and steps lost "
        "to interruptions. Evaluation time is the workers' time for sampling and feature extraction. It excludes "
        "loading models. "
    )
    note += "No price is set (`--price_per_hour`)." if price is None else f"One GPU hour costs ${price:,.2f}."
    return [macros.table("Training and evaluation", header, rows), macros.paragraph(note)]


def data(runs: Sequence[LoggedRun]) -> list[Markup]:
    """Tabulate the samples in every root that the runs were trained on: encoded, rejected by reason, and per bucket."""
    readers: dict[str, list[str]] = {}
    for run in runs:
        for stream in run.config["data"]["streams"]:
            readers.setdefault(stream["root"], []).append(f"{run.name} reads {stream['bucket']}")
    return [part for root, users in readers.items() for part in _root(root, users)]


def chart(title: str, x_name: str, y_name: str, series: Sequence[Series], note: str = "", log: bool = False) -> Markup:
    """Build a line chart with a note and a table of its values."""
    steps = sorted({x for line in series for x, _ in line.points})
    listed = set(spread(steps, TABLE_ROWS))
    rows = []
    for line in series:
        for i, (x, y) in enumerate(line.points):
            if x in listed or len(line.points) <= TABLE_ROWS:
                rows.append([line.name, round(x), y, *(line.intervals[i] if line.intervals else ())])
    ends = ["95 % from", "to"] if any(line.intervals for line in series) else []
    values = macros.table(f"{title}: values", ["line", x_name, y_name, *ends], rows)
    return macros.figure(title, line_chart(title, x_name, y_name, series, log), note, values)


def _root(root: str, users: list[str]) -> list[Markup]:
    parts = [macros.heading(root), macros.paragraph("; ".join(dict.fromkeys(users)) + ".")]
    try:
        store = open_store(parse_place(root))
        encoding, totals = EncodingRecord.load(store), root_totals(store)
    except (RequestError, WorkError, OSError) as error:
        return [*parts, macros.paragraph(f"The root cannot be read from here, so its samples are not listed: {error}")]
    samples, encoded = totals.samples_in, totals.encoded
    counts = [["in the tars", samples], ["encoded", encoded], ["rejected", samples - encoded], ["tars", totals.shards]]
    image = encoding.image
    parts.append(macros.paragraph(f"Encoding {encoding.id}: {image.weights.name}, {image.posterior}."))
    parts.append(macros.table("Samples", ["", "number"], counts))
    if rejected := [list(row) for row in totals.rejected.most_common()]:
        parts.append(macros.table("Rejected samples", ["reason", "samples"], rejected))
    buckets = [[name, size["samples"], size["bytes_per_sample"]] for name, size in totals.buckets.items()]
    return [*parts, macros.table("Stored samples", ["bucket", "samples", "bytes per sample on disk"], buckets)]


def _curves(
    runs: Sequence[LoggedRun], field: str, suffix: str = "", first_style: int = 0, max_points: int = MAX_POINTS
) -> list[Series]:
    """Return the curve of a logged field for each run that logged it."""
    offsets, lines = step_offsets(runs), []
    for style, run in enumerate(runs, start=first_style):
        if curve := run.curve(field, offsets[run.name]):
            lines.append(Series(run.name + suffix, binned(curve, max_points), style=style))
    return lines


def _by_setting(run: LoggedRun) -> dict[str, list[Evaluation]]:
    """Group a run's evaluations by sampling settings and weights."""
    groups: dict[str, list[Evaluation]] = {}
    for evaluation in run.evaluations:
        groups.setdefault(evaluation.title, []).append(evaluation)
    return groups


def _newest(run: LoggedRun) -> dict[str, Evaluation]:
    return {setting: its[-1] for setting, its in _by_setting(run).items()}
