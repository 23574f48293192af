"""A run as its folder tells of it: config, log, evaluations; and what follows from them."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from evaluation.report.records import Evaluation, evaluations, run_config
from shards.base.durable import parse_json_lines
from shards.base.errors import RequestError
from shards.base.store import parse_place
from shards.open import open_store

BINS = 150
"""Of a curve: where a log has more lines, points are means of consecutive ones."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Run:
    """A training, read once."""

    place: Path | str
    name: str
    """As short as tells it from the others."""
    config: dict[str, Any]
    log: list[dict[str, Any]]
    """Lines of metrics.jsonl."""
    evaluations: list[Evaluation]

    @property
    def steps(self) -> int:
        """Done, as far as is logged."""
        return int(self.log[-1]["step"]) if self.log else 0

    @property
    def seconds(self) -> float:
        """Of its steps, by their speed; starts, validation and what an interruption undid are not among them."""
        before = [0, *(line["step"] for line in self.log)]
        pairs = zip(before, self.log, strict=False)
        batch = self.config["global_batch_size"]
        return sum((line["step"] - last) * batch / line["images_per_second"] for last, line in pairs)

    @property
    def gpu_hours(self) -> float:
        """Seconds of its steps, of each of its processes."""
        return self.seconds * self.num_processes / 3600

    @property
    def num_processes(self) -> int:
        """That trained it, at the last line."""
        last = self.log[-1] if self.log else {"images_per_second": 1, "images_per_second_per_gpu": 1}
        return round(last["images_per_second"] / (last.get("images_per_second_per_gpu") or last["images_per_second"]))

    def middle(self, field: str) -> float | None:
        """Median over the lines that have it."""
        values = [value for _, value in self.curve(field)]
        return median(values) if values else None

    def curve(self, field: str, start: int = 0) -> list[Point]:
        """(step + start, value) of every line that has a finite one."""
        values = [(line["step"] + start, line.get(field)) for line in self.log]
        return [(step, value) for step, value in values if value is not None and math.isfinite(value)]


def read_runs(names: list[str]) -> list[Run]:
    """The runs in these folders or at these addresses.

    Raises:
        RequestError: one is no run, or stands there twice.
    """
    places = [parse_place(name) for name in names]
    if len(set(map(str, places))) < len(places):
        raise RequestError(f"A run stands there twice: {', '.join(names)}. Name each once.")
    return [_read(place, name) for place, name in zip(places, short_names(names), strict=True)]


def short_names(names: list[str]) -> list[str]:
    """As many of each path's last parts as tell them all apart."""
    parts = [name.rstrip("/").split("/") for name in names]
    longest = max(map(len, parts), default=1)
    for count in range(1, longest + 1):
        short = ["/".join(its[-count:]) for its in parts]
        if len(set(short)) == len(short):
            return short
    return names


def starts(runs: list[Run]) -> dict[str, int]:
    """Name → steps of the runs before it: a run that began from another of these follows it."""
    by_place = {str(run.place): run for run in runs}
    found: dict[str, int] = {}
    for run in runs:
        before, seen = by_place.get(str(run.config.get("init_from"))), {str(run.place)}
        found[run.name] = 0
        while before is not None and str(before.place) not in seen:
            found[run.name] += before.steps
            seen.add(str(before.place))
            before = by_place.get(str(before.config.get("init_from")))
    return found


def binned(points: list[Point], count: int = BINS) -> list[Point]:
    """At most `count` points: means of consecutive ones."""
    size = -(-len(points) // count)
    groups = [points[i : i + size] for i in range(0, len(points), max(1, size))]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def _read(place: Path | str, name: str) -> Run:
    store = open_store(place)
    config = run_config(store)
    try:
        log = parse_json_lines(store.read("metrics.jsonl"), store.where("metrics.jsonl"))
    except FileNotFoundError:
        log = []
    return Run(place, name, config, log, evaluations(place))
