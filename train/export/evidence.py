"""Evidence about a run for its model card: images, metrics, data statistics and cost."""

import shutil
from collections.abc import Iterable
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from shards.base.durable import DamagedFile, parse_json_lines
from shards.base.errors import Outage, RequestError
from shards.base.store import Place
from shards.open import open_store
from shards.tools.stats import root_totals
from train.run.reporting.json_lines import read_json_lines, step_seconds

SAMPLES = "samples"
"""Folder of the export with images."""
MAX_SAMPLES = 8


def evaluations(run: Path, checkpoint: dict[str, Any], weights: str) -> list[dict[str, Any]]:
    """Return the results of a checkpoint's weights that `python -m evaluation` appended to evaluations.jsonl.

    Args:
        checkpoint: content of its state.json.
        weights: folder of the weights in the checkpoint: `unet` or `ema`; other weights have no results.
    """
    path = run / "evaluations.jsonl"
    rows = parse_json_lines(path.read_bytes(), str(path)) if path.is_file() else []
    has_average = any(name.startswith("ema/") for name in checkpoint["files"])
    names = {"unet": {"raw"}, "ema": {"ema"}}.get(weights, set())
    if weights == ("ema" if has_average else "unet"):
        names = names | {"auto"}
    return [row for row in rows if row.get("step") == checkpoint["state"]["step"] and row.get("weights") in names]


def describe_evaluations(rows: list[dict[str, Any]]) -> str:
    """Tabulate metrics with their 95 % intervals."""
    if not rows:
        return "This checkpoint has not been evaluated with `python -m evaluation`."
    lines = ["| metric | value | 95 % interval | images | steps | guidance |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        setting = row.get("setting", {})
        interval = f"{row['low']:.4g} to {row['high']:.4g}" if row.get("low") is not None else ""
        cells = (row["metric"], f"{row['value']:.4g}", interval, f"{row['n']:,}")
        lines.append(
            "| " + " | ".join((*cells, str(setting.get("steps", "")), str(setting.get("guidance", "")))) + " |"
        )
    return "\n".join(lines)


def copy_samples(run: Path, rows: list[dict[str, Any]], target: Path) -> list[str]:
    """Copy the first images of the first evaluated set into the export, and return their names in it."""
    sets = list(dict.fromkeys(row["set"] for row in rows if "set" in row))
    pictures = sorted((run / "evaluations" / sets[0] / "pictures").glob("*/*")) if sets else []
    names = []
    by_name = {picture.name: picture for picture in pictures}  # two attempts at a part draw the same images
    for picture in islice(by_name.values(), MAX_SAMPLES):
        (target / SAMPLES).mkdir(exist_ok=True)
        names.append(f"{SAMPLES}/{picture.name}")
        shutil.copyfile(picture, target / names[-1])
    return names


def describe_samples(names: list[str]) -> str:
    """Return Markdown that shows the images."""
    if not names:
        return ""
    images = " ".join(f"![]({name})" for name in names)
    return f"\nThe first images of the evaluation, not hand-picked:\n\n{images}\n"


def describe_funnels(roots: Iterable[Place]) -> str:
    """Tabulate how many input images each root rejected and encoded."""
    return "\n\n".join(f"{root}:\n\n{_funnel_or_reason(root)}" for root in dict.fromkeys(roots))


def _funnel_or_reason(root: Place) -> str:
    try:
        totals = root_totals(open_store(root))
    except (RequestError, DamagedFile, Outage) as error:  # the model does not depend on it
        return f"The numbers of images are unknown, because the root cannot be read: {error}"
    rows = [
        ("images in the input", totals.samples_in),
        *((f"rejected: {why.replace('_', ' ')}", -count) for why, count in totals.rejected.most_common()),
        ("encoded", totals.encoded),
    ]
    lines = ["| | images |", "| --- | --- |", *(f"| {name} | {count:,} |" for name, count in rows)]
    return "\n".join(lines)


def gpu_hours(run: Path, step: int, global_batch_size: int) -> float | None:
    """Compute the GPU-hours of the steps up to `step`, or return None if none were logged."""
    lines = takewhile(lambda line: line["step"] <= step, read_json_lines(run / "metrics.jsonl"))
    seconds = sum(seconds * processes for seconds, processes in step_seconds(lines, global_batch_size))
    return seconds / 3600 or None
