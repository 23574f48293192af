"""The report of one or more runs: its sections, in order, and the page around them."""

import html
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from PIL.Image import Image
from pydantic import Field

from evaluation.metrics.identity import check_comparable
from evaluation.report.charts import Series
from evaluation.report.markup import chart, columns, picture_row, section, table, text
from evaluation.report.pictures import first_pictures, spread
from evaluation.report.records import Evaluation
from evaluation.report.runs import Run, binned, starts
from evaluation.sampling.prompts import Prompt
from evaluation.scoring import Row
from shards.base.config import Config
from shards.base.errors import RequestError, WorkError
from shards.base.store import parse_place
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from shards.tools.stats import root_totals

TEMPLATE = Path(__file__).with_name("page.html")


class ReportConfig(Config):
    """Write what is known of runs into one page."""

    output: Path = Path("runs/report.html")
    """Where the page goes."""
    price_per_hour: float | None = Field(None, ge=0)
    """Dollars for one GPU for an hour (`plan/gpus.yaml` has some); null: GPU hours alone."""
    prompts: int = Field(6, ge=0)
    """Of each sample set's first prompts, pictures are shown."""
    checkpoints: int = Field(8, ge=2)
    """With pictures: as many at most, evenly."""
    side: int = Field(160, ge=16)
    """Pixels of a picture's longer side in the page."""


def render(runs: Sequence[Run], config: ReportConfig, title: str, before: Sequence[str] = ()) -> str:
    """The page; `before`: sections of the caller's own that come first."""
    found = {
        "summary": summary(runs),
        "losses": losses(runs),
        "metrics": metrics(runs),
        "pictures": strips(runs, config),
        "same-prompts": same_prompts(runs, config),
        "speed": speed(runs),
        "cost": costs(runs, config.price_per_hour),
        "data": data(runs),
    }
    sections = [*before, *filter(None, found.values())]
    return Template(TEMPLATE.read_text()).substitute(
        title=html.escape(title), contents="".join(map(_entry, sections)), main="".join(sections)
    )


def _entry(part: str) -> str:
    """In the list of contents."""
    name, heading = part.split('id="', 1)[1].split('"', 1)[0], part.split("<h2", 1)[1].split(">", 1)[1].split("<", 1)[0]
    return f'<li><a href="#{name}">{heading}</a></li>'


def summary(runs: Sequence[Run]) -> str:
    """A row for each run, and for each of its newest numbers."""
    rows = [[run.name, run.steps, run.config["max_steps"], _last_loss(run), str(run.place)] for run in runs]
    newest = [
        [run.name, row["metric"], row["value"], row["low"], row["high"], each.step, row["n"], setting, row["id"]]
        for run in runs
        for setting, each in _newest(run).items()
        for row in each.rows
    ]
    header = ["run", "metric", "value", "95 % from", "to", "step", "N", "setting", "id"]
    measured = (
        table("Newest metrics", header, newest)
        if newest
        else text("No metrics yet: `python -m evaluation watch RUN` takes them.")
    )
    return section(
        "summary",
        "At a glance",
        table("Runs", ["run", "steps done", "of", "loss, last 10 lines", "folder"], rows),
        measured,
    )


def losses(runs: Sequence[Run]) -> str:
    """All runs in one picture; one that began from another goes on where that ended."""
    start = starts(list(runs))
    lines = [
        Series(name, binned(run.curve(field, start[run.name])), style=style + number)
        for field, style in (("loss", 0), ("val_loss", len(runs)))
        for number, run in enumerate(runs)
        for name in [run.name if field == "loss" else f"{run.name} held out"]
        if run.curve(field)
    ]
    if not lines:
        return section("losses", "Loss", text("Nothing was logged yet."))
    chained = [run.name for run in runs if start[run.name]]
    note = "Each point is the mean of some lines of the log." + (
        f" {' and '.join(chained)} began from another of these runs, and is drawn behind it." if chained else ""
    )
    return section(
        "losses", "Loss", chart("Loss over steps", "optimizer steps", "mean squared error", lines, note, log=True)
    )


def metrics(runs: Sequence[Run]) -> str:
    """A chart for each metric id: numbers of two ids are never in one."""
    by_id: dict[str, list[tuple[str, Row]]] = {}
    settings: dict[str, str] = {}
    for run in runs:
        for each in run.evaluations:
            for row in each.rows:
                name = run.name if each.weights == "auto" else f"{run.name} {each.weights}"
                by_id.setdefault(row["id"], []).append((name, row))
                settings[row["id"]] = each.setting
    told = (name for named in by_id.values() for name, _ in named)
    names = list(dict.fromkeys([*(run.name for run in runs), *told]))
    if not by_id:
        return ""
    charts = []
    for number, named in by_id.items():
        check_comparable([row for _, row in named])
        first, lines = named[0][1], []
        for name in dict.fromkeys(name for name, _ in named):
            its = [row for other, row in named if other == name]
            points = [(float(row["step"] or 0), row["value"]) for row in its]
            lines.append(Series(name, points, [(row["low"], row["high"]) for row in its], names.index(name)))
        title = f"{first['metric']}, {settings[number]}, id {number}"
        note = (
            f"{first['better'].capitalize()} is better. N {first['n']:,}"
            + (f" against {first['reference_n']:,}" if first["reference_n"] else "")
            + f". Bars: 95 % of the {first['estimand']}."
        )
        charts.append(chart(title, "checkpoint's step", first["metric"], lines, note))
    ids = "Each number's id stands for extractor, N, prompts, reference and sampler. A chart has one id."
    return section("metrics", "Metrics", text(ids), columns(charts))


def strips(runs: Sequence[Run], config: ReportConfig) -> str:
    """The same prompts from the same noise, over a run's checkpoints."""
    parts = []
    for run in runs:
        for setting, its in _by_setting(run).items():
            rows: dict[Prompt, dict[str, Image]] = {}
            for each in spread(its, config.checkpoints):
                for shown in first_pictures(each.place, config.prompts, config.side):
                    rows.setdefault(shown.prompt, {})[f"step {each.step}"] = shown.picture
            drawn = [picture_row(prompt.text, row) for prompt, row in rows.items()]
            parts += [f"<h3>{html.escape(f'{run.name}, {setting}')}</h3>", columns(drawn)] if drawn else []
    return section("pictures", "Fixed prompts through training", *parts) if parts else ""


def same_prompts(runs: Sequence[Run], config: ReportConfig) -> str:
    """The newest pictures of prompts that several runs were given, side by side."""
    rows: dict[Prompt, dict[str, Image]] = {}
    told_by: dict[Prompt, set[str]] = {}
    for run in runs:
        newest = _newest(run)
        for setting, each in newest.items():
            label = f"{run.name}, step {each.step}" + (f", {setting}" if len(newest) > 1 else "")
            for shown in first_pictures(each.place, config.prompts, config.side):
                rows.setdefault(shown.prompt, {})[label] = shown.picture
                told_by.setdefault(shown.prompt, set()).add(run.name)
    drawn = [picture_row(prompt.text, row) for prompt, row in rows.items() if len(told_by[prompt]) > 1]
    return section("same-prompts", "Runs side by side", columns(drawn)) if drawn else ""


def speed(runs: Sequence[Run]) -> str:
    fields = ("images_per_second", "images_per_second_per_gpu", "mfu", "data_wait", "memory_gb")
    header = ["run", "images/s", "per process", "MFU", "share of time waiting for data", "GiB at most"]
    rows = [[run.name, *(run.middle(field) for field in fields)] for run in runs]
    start, drawn = starts(list(runs)), []
    for field, name in (("images_per_second", "images per second"), ("mfu", "MFU")):
        lines = [
            Series(run.name, binned(run.curve(field, start[run.name]), 40), style=number)
            for number, run in enumerate(runs)
            if run.curve(field)
        ]
        drawn += [chart(f"{name[0].upper()}{name[1:]}", "optimizer steps", name, lines)] if lines else []
    unknown = (
        []
        if any(run.curve("mfu") for run in runs)
        else [text("MFU is not known: the device has no entry, and `log.peak_tflops` was not set.")]
    )
    return section("speed", "Speed", table("Medians over the log", header, rows), *unknown, columns(drawn))


def costs(runs: Sequence[Run], price: float | None) -> str:
    """Hours of the steps themselves, and of evaluations' pictures and features; and their price."""
    rows: list[list[Any]] = []
    for run in runs:
        images = run.steps * run.config["global_batch_size"]
        rows.append([run.name, images, run.num_processes, run.seconds / 3600, run.gpu_hours])
        if run.evaluations:
            hours = sum(evaluation.seconds for evaluation in run.evaluations) / 3600
            rows.append([f"{run.name}, {len(run.evaluations)} evaluations", None, None, None, hours])
    rows.append(["all", sum(row[1] or 0 for row in rows), None, None, sum(row[4] for row in rows)])
    rows = [[*row, None if price is None else f"${row[4] * price:,.2f}"] for row in rows]
    note = "Training: from the speed that the log has of each step; starts, validation and steps that were lost are "
    note += "not in it. Evaluations: workers' time for pictures and features; loading models is not in it. "
    note += "No price was given (`--price_per_hour`)." if price is None else f"One GPU hour is ${price:,.2f}."
    header = ["run", "images", "processes", "hours", "process hours", "dollars"]
    return section("cost", "What it cost", table("Training and evaluation", header, rows), text(note))


def data(runs: Sequence[Run]) -> str:
    """What went into each root, and what became of it."""
    read: dict[str, list[str]] = {}
    for run in runs:
        for stream in run.config["data"]["streams"]:
            read.setdefault(stream["root"], []).append(f"{run.name} reads {stream['bucket']}")
    return section("data", "Data", *(part for root, users in read.items() for part in _root(root, users)))


def _root(root: str, users: list[str]) -> list[str]:
    heading = f"<h3>{html.escape(root)}</h3>{text('; '.join(dict.fromkeys(users)) + '.')}"
    try:
        store = open_store(parse_place(root))
        encoding, totals = EncodingRecord.load(store), root_totals(store)
    except (RequestError, WorkError, OSError) as error:
        return [heading, text(f"The root cannot be read from here, so nothing is said of its samples: {error}")]
    samples, encoded = totals.samples_in, totals.encoded
    counts = [["in the tars", samples], ["encoded", encoded], ["rejected", samples - encoded], ["tars", totals.shards]]
    rejected = [list(row) for row in totals.rejected.most_common()]
    buckets = [[name, size["samples"], size["bytes_per_sample"]] for name, size in totals.buckets.items()]
    return [
        heading,
        text(f"Encoding {encoding.id}: {encoding.image.weights.name}, {encoding.image.posterior}."),
        table("Samples", ["", "samples"], counts),
        table("Rejected because", ["reason", "samples"], rejected) if rejected else "",
        table("Stored", ["bucket", "samples", "bytes per sample on disk"], buckets),
    ]


def _by_setting(run: Run) -> dict[str, list[Evaluation]]:
    found: dict[str, list[Evaluation]] = {}
    for each in run.evaluations:
        name = each.setting if each.weights == "auto" else f"{each.setting}, {each.weights} weights"
        found.setdefault(name, []).append(each)
    return found


def _newest(run: Run) -> dict[str, Evaluation]:
    return {setting: its[-1] for setting, its in _by_setting(run).items()}


def _last_loss(run: Run) -> float | None:
    last = [value for _, value in run.curve("loss")[-10:]]
    return sum(last) / len(last) if last else None
