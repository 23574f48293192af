"""Training runs as recorded in their folders: config, log, evaluations, and quantities derived from them.

evaluations.jsonl is generated from the evaluations in a run folder.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from evaluation.metrics.table import METRICS, RECORDS, Row
from evaluation.parts import seconds_of_parts
from evaluation.sampling.sets import below
from shards.base.durable import parse_json_lines, parse_sealed_json
from shards.base.errors import RequestError
from shards.base.store import parse_place, resolved_place
from shards.open import open_store
from train.run.recorded import run_config
from train.run.reporting.json_lines import step_seconds

FOLDER, LINES = "evaluations", "evaluations.jsonl"
STEP_FOLDER = re.compile(r"step-(\d{8,})-(auto|raw|ema)")
SET_FOLDER = re.compile(r"g[\de.+-]+-s\d+-\w+")
MAX_POINTS = 150
"""Maximum number of points on a curve. For a longer log, each point is the mean of consecutive lines."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Evaluation:
    """A sample set drawn from a run's checkpoint, and its metrics."""

    step: int
    weights: str
    """Weights of the checkpoint that were used: `auto`, `raw` or `ema`."""
    setting: str
    """Sampling settings as a short name, such as `g8-s50-own`."""
    place: Path | str
    rows: tuple[Row, ...]
    """Metrics of the sample set. Every metric id occurs only once."""
    seconds: float
    """Time spent on sampling and feature extraction, summed over all workers."""

    @property
    def title(self) -> str:
        """The setting, and the weights unless they are `auto`."""
        return self.setting if self.weights == "auto" else f"{self.setting}, {self.weights} weights"


def step_place(place: Path | str, step: int, weights: str) -> Path | str:
    """Return the folder or URL for a checkpoint's sample sets."""
    return below(place, f"{FOLDER}/step-{step:08d}-{weights}")


def evaluations(place: Path | str) -> list[Evaluation]:
    """Load a run's evaluations, including sample sets without metrics, sorted by step, weights and setting.

    Raises:
        DamagedFile: a record does not match its checksum.
    """
    found = []
    for folder in open_store(below(place, FOLDER)).entries():
        if match := STEP_FOLDER.fullmatch(folder):
            step_folder = below(place, f"{FOLDER}/{folder}")
            for name in filter(SET_FOLDER.fullmatch, open_store(step_folder).entries()):
                place_of_set = below(step_folder, name)
                seconds = seconds_of_parts(open_store(place_of_set))
                found.append(Evaluation(int(match[1]), match[2], name, place_of_set, _rows(place_of_set), seconds))
    return sorted(found, key=lambda evaluation: (evaluation.step, evaluation.weights, evaluation.setting))


def lines(found: list[Evaluation]) -> list[dict[str, Any]]:
    """Return the lines of evaluations.jsonl: one per step, sample set and metric id."""
    names = [f"step-{each.step:08d}-{each.weights}/{each.setting}" for each in found]
    return [{"step": e.step, "set": name, **row} for e, name in zip(found, names, strict=True) for row in e.rows]


def write_lines(place: Path | str) -> list[Evaluation]:
    """Write evaluations.jsonl and return the evaluations in it.

    If several processes do this at once, a slow process may overwrite the file with fewer lines. Each process therefore
    rereads the records after writing, and repeats both until the records match what it wrote. This way, the last writer
    has seen all records.
    """
    store, written, found = open_store(place), None, evaluations(place)
    while (text := "".join(json.dumps(line) + "\n" for line in lines(found))) != written:
        store.write(LINES, text.encode())
        written, found = text, evaluations(place)
    return found


def _rows(place: Path | str) -> tuple[Row, ...]:
    """Load a sample set's metrics in the order of `METRICS`."""
    store = open_store(place)
    records = store.read_many([f"{RECORDS}/{name}" for name in store.files(RECORDS)])
    rows = [parse_sealed_json(data, store.where(name)) for name, data in records.items()]
    order = {name: number for number, name in enumerate(METRICS)}
    return tuple(sorted(rows, key=lambda row: (order.get(row["metric"], len(order)), row["id"])))


@dataclass(frozen=True)
class LoggedRun:
    """A training run, loaded once."""

    place: Path | str
    name: str
    """Shortest name that distinguishes the run from the others that were loaded with it."""
    config: dict[str, Any]
    log: list[dict[str, Any]]
    """Lines of metrics.jsonl."""
    evaluations: list[Evaluation]

    @property
    def steps(self) -> int:
        """Last logged step."""
        return int(self.log[-1]["step"]) if self.log else 0

    @cached_property
    def _steps(self) -> list[tuple[float, int]]:
        """Seconds and number of processes for each line of the log; see `step_seconds`."""
        return list(step_seconds(self.log, self.config["global_batch_size"]))

    @property
    def seconds(self) -> float:
        """Duration of all steps, derived from their logged speed. Excludes startup, validation and interrupted work."""
        return sum(seconds for seconds, _ in self._steps)

    @property
    def gpu_hours(self) -> float:
        """Duration of all steps times the number of processes at the time, in hours."""
        return sum(seconds * processes for seconds, processes in self._steps) / 3600

    @property
    def num_processes(self) -> int:
        """Number of training processes, according to the last line of the log."""
        return self._steps[-1][1] if self._steps else 1

    def median(self, field: str) -> float | None:
        """Return the median of a logged field, or None if no line has the field."""
        values = [value for _, value in self.curve(field)]
        return median(values) if values else None

    def curve(self, field: str, offset: int = 0) -> list[Point]:
        """Return (step + offset, value) for every log line in which the value is finite."""
        values = [(line["step"] + offset, line.get(field)) for line in self.log]
        return [(step, value) for step, value in values if value is not None and math.isfinite(value)]


def read_runs(names: list[str]) -> list[LoggedRun]:
    """Load the runs in these folders or at these URLs.

    Raises:
        RequestError: a folder is not a training run, or is listed twice.
    """
    places = [parse_place(name) for name in names]
    if len(set(map(resolved_place, names))) < len(places):
        raise RequestError(f"The same run is listed more than once: {', '.join(names)}. List each run only once.")
    return [_read(place, name) for place, name in zip(places, short_names(names), strict=True)]


def short_names(names: list[str]) -> list[str]:
    """Shorten paths to the fewest trailing components that keep them distinct."""
    parts = [name.rstrip("/").split("/") for name in names]
    longest = max(map(len, parts), default=1)
    for count in range(1, longest + 1):
        short = ["/".join(components[-count:]) for components in parts]
        if len(set(short)) == len(short):
            return short
    return names


def step_offsets(runs: Sequence[LoggedRun]) -> dict[str, int]:
    """Return a dict from run name to the number of steps that were trained before it.

    The steps of all predecessors count: the run from which a run was initialised, that run's own predecessor, and so
    on. Predecessors that are not in `runs` are not counted.
    """
    by_place = {resolved_place(run.place): run for run in runs}
    predecessors = {
        run.name: by_place.get(resolved_place(start)) for run in runs if (start := run.config.get("init_from"))
    }
    offsets: dict[str, int] = {}
    for run in runs:
        predecessor, seen = predecessors.get(run.name), {run.name}
        offsets[run.name] = 0
        while predecessor is not None and predecessor.name not in seen:
            offsets[run.name] += predecessor.steps
            seen.add(predecessor.name)
            predecessor = predecessors.get(predecessor.name)
    return offsets


def compare(first: LoggedRun, second: LoggedRun) -> str:
    """Format each metric that is common to both runs: a heading, then one line per run.

    Raises:
        RequestError: a metric has different ids in the two runs, or the runs have no metric in common.
    """
    # for each run: metric → (id, weights) → row from the latest step that has them
    found: tuple[dict[str, dict[tuple[str, str], Row]], ...] = ({}, {})
    for run, rows in zip((first, second), found, strict=True):
        for evaluation, row in ((one, row) for one in run.evaluations for row in one.rows):
            rows.setdefault(row["metric"], {})[row["id"], evaluation.weights] = row
    ours, theirs = found
    lines = []
    for name in (name for name in ours if name in theirs):
        shared = [key for key in ours[name] if key in theirs[name]]
        if not shared:
            one, other = (next(iter(rows[name].values())) for rows in found)
            raise RequestError(
                f"{name} {one['id']} ({one['model']}) and {name} {other['id']} ({other['model']}) are different "
                f"metrics: they differ in the extractor, the number of images, the prompts, the reference, the "
                f"sampler or the weights, so their values cannot be compared. Evaluate both models with the same "
                f"config."
            )
        for key in shared:
            row, (number, weights) = ours[name][key], key
            which = "" if weights == "auto" else f"{weights} weights, "
            lines.append(f"{name} {number} ({row['better']} is better), {which}N {row['n']}")
            for run, rows in zip((first, second), found, strict=True):
                row = rows[name][key]
                lines.append(
                    "  {:<20} step {step:>8}  {value:z10.4f}  [{low:z.4f}, {high:z.4f}]".format(run.name, **row)
                )
    if not lines:
        without = [run.name for run, rows in zip((first, second), found, strict=True) if not rows]
        reason = f": {' and '.join(without)} {'has' if len(without) == 1 else 'have'} none" if without else ""
        raise RequestError(
            f"{first.name} and {second.name} have no metric in common{reason}. "
            f"Evaluate both with the same config (`python -m evaluation watch RUN`)."
        )
    return "\n".join(lines)


def binned(points: list[Point], count: int = MAX_POINTS) -> list[Point]:
    """Reduce a curve to at most `count` points by averaging consecutive points."""
    size = -(-len(points) // count)
    groups = [points[i : i + size] for i in range(0, len(points), max(1, size))]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def _read(place: Path | str, name: str) -> LoggedRun:
    store = open_store(place)
    config = run_config(store)
    try:
        log = parse_json_lines(store.read("metrics.jsonl"), store.where("metrics.jsonl"))
    except FileNotFoundError:
        log = []
    return LoggedRun(place, name, config, log, evaluations(place))
