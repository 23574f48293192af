"""Evaluations of a run as they lie below it: which sample sets have metrics, and evaluations.jsonl made of them."""

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
    """A run folder's config, as the trainer resolved it.

    Raises:
        RequestError: it has none.
    """
    try:
        config: dict[str, Any] = yaml.safe_load(run.read("config.yaml"))
    except FileNotFoundError:
        raise RequestError(
            f"{run.where()} is no run: it has no config.yaml. Give the run_dir of a training, or its address."
        ) from None
    except yaml.YAMLError as error:
        raise RequestError(f"{run.where('config.yaml')} is no YAML: {error}. Restore it from a copy.") from error
    if not isinstance(config, dict):
        raise RequestError(f"{run.where('config.yaml')} is no run's config. Restore it from a copy.")
    return config


@dataclass(frozen=True)
class Evaluation:
    """A sample set of a run's checkpoint."""

    step: int
    name: str
    """Its folder in evaluations/: `step-00001000-auto/g8-s50-own`."""
    place: Path | str
    rows: tuple[Row, ...]
    """Of its metrics, each id once."""
    seconds: float
    """That its pictures and their features took, on all workers."""

    @property
    def weights(self) -> str:
        """Of the checkpoint: `auto`, `raw` or `ema`."""
        return self.name.partition("/")[0].rpartition("-")[2]

    @property
    def setting(self) -> str:
        """What its pictures were drawn under: `g8-s50-own`."""
        return self.name.rpartition("/")[2]


def step_place(place: Path | str, step: int, weights: str) -> Path | str:
    """Where the pictures of a checkpoint go."""
    return below(place, f"{FOLDER}/step-{step:08d}-{weights}")


def evaluations(place: Path | str) -> list[Evaluation]:
    """Those of a run, by step and name; sample sets without metrics among them.

    Raises:
        DamagedFile: a record is not as it was written.
    """
    found = []
    for folder in open_store(below(place, FOLDER)).entries():
        if match := STEP_FOLDER.fullmatch(folder):
            step_folder = below(place, f"{FOLDER}/{folder}")
            for name in filter(SET_FOLDER.fullmatch, open_store(step_folder).entries()):
                its = below(step_folder, name)
                found.append(
                    Evaluation(int(match[1]), f"{folder}/{name}", its, _rows(its), seconds_of_parts(open_store(its)))
                )
    return sorted(found, key=lambda evaluation: (evaluation.step, evaluation.name))


def lines(found: list[Evaluation]) -> list[dict[str, Any]]:
    """Of evaluations.jsonl: one for each (step, sample set, metric id), in order."""
    return [{"step": each.step, "set": each.name, **row} for each in found for row in each.rows]


def write_lines(place: Path | str) -> list[Evaluation]:
    """Make evaluations.jsonl of the records. Of several that do so at once, the last one has seen all records."""
    store, written, found = open_store(place), None, evaluations(place)
    while (text := "".join(json.dumps(line) + "\n" for line in lines(found))) != written:
        store.write(LINES, text.encode())
        written, found = text, evaluations(place)  # a slower one may have put fewer in place of more
    return found


def _rows(place: Path | str) -> tuple[Row, ...]:
    store = open_store(place)
    records = store.read_many([f"{RECORDS}/{name}" for name in store.files(RECORDS)])
    rows = [parse_sealed_json(data, store.where(name)) for name, data in records.items()]
    order = {name: number for number, name in enumerate(METRICS)}
    return tuple(sorted(rows, key=lambda row: (order.get(row["metric"], len(order)), row["id"])))
