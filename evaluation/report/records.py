"""The evaluations stored below a run folder, and evaluations.jsonl, which is generated from them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from evaluation.metrics.table import METRICS
from evaluation.parts import seconds_of_parts
from evaluation.sampling.job import below
from evaluation.scoring import RECORDS, Row
from shards.base.durable import parse_sealed_json
from shards.base.errors import RequestError
from shards.base.store import Store
from shards.open import open_store

FOLDER, LINES = "evaluations", "evaluations.jsonl"
STEP_FOLDER = re.compile(r"step-(\d{8,})-(auto|raw|ema)")
SET_FOLDER = re.compile(r"g[\de.+-]+-s\d+-\w+")


def run_config(run: Store) -> dict[str, Any]:
    """Read a run's resolved training config.

    Raises:
        RequestError: the folder has no config.yaml, or it cannot be parsed.
    """
    try:
        config: dict[str, Any] = yaml.safe_load(run.read("config.yaml"))
    except FileNotFoundError:
        raise RequestError(
            f"{run.where()} is not a training run: it has no config.yaml. Give the run_dir of a training run, or its "
            f"URL."
        ) from None
    except yaml.YAMLError as error:
        raise RequestError(
            f"{run.where('config.yaml')} cannot be parsed as YAML: {error}. Restore it from a backup."
        ) from error
    if not isinstance(config, dict):
        raise RequestError(f"{run.where('config.yaml')} is not a training config. Restore it from a backup.")
    return config


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
    """Metrics of the sample set; every metric id occurs once."""
    seconds: float
    """Time spent on sampling and feature extraction, summed over all workers."""


def step_place(place: Path | str, step: int, weights: str) -> Path | str:
    """Return the folder for a checkpoint's sample sets."""
    return below(place, f"{FOLDER}/step-{step:08d}-{weights}")


def evaluations(place: Path | str) -> list[Evaluation]:
    """Load a run's evaluations, sorted by step and name. Includes sample sets that have no metrics yet.

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

    If several processes do this at once, a slow one may overwrite the file with fewer lines. Each process therefore
    rereads the records after writing, and repeats until they match what it wrote, so the last writer has seen all
    records.
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
