"""What a run's tracker is told of evaluations: curves, and pictures of fixed prompts, at the checkpoint's own step.

TensorBoard gets a file for each step, created if absent, in a folder of its own: it reads one file of a folder at a
time, and would lose sight of the trainer's. For any other tracker a sheet is left in the run, created if absent, and
the run tells its tracker (`train/run/telling/evaluations.py`): a second process that writes to a run of wandb's
overwrites what the first one wrote, in wandb's shared mode too (its issues 10349 and 12269).

    RUN/tracker/evaluations/0000001000.3f2a9c1d.zip    a sheet: values.json, with the step, and a PNG for each picture
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import numpy as np
from PIL import Image

from evaluation.report.pictures import first_pictures, grid, side_by_side, spread
from evaluation.report.records import Evaluation, run_config
from shards.base.store import Store
from shards.open import open_store

PROMPTS, GRID, COLUMNS = 4, 16, 4
"""With a strip each, and in a grid."""
MOST_STEPS, SIDE = 12, 256
"""Of a strip, and of a picture in pixels."""
EVENTS = "tracker/evaluations/events.out.tfevents.{step:010d}.{names}"
SHEET, TOLD = "{step:010d}.{names}.zip", ".told.json"
SHEETS = "tracker/evaluations"

Track = Callable[[int, list[Evaluation]], None]


def open_tracker(run: Store, output: Path | str) -> Track:
    """What tells the tracker of the run's own config (`log.tracker`) of a step, given all evaluations."""
    name = run_config(run).get("log", {}).get("tracker", "none")
    store = open_store(output)
    if name == "none":
        return lambda step, found: None
    if name == "tensorboard":
        if find_spec(name) is None:
            print("tensorboard is told nothing of evaluations: it is not installed here. They are in the report.")
            return lambda step, found: None
        return lambda step, found: to_tensorboard(store, step, found)
    if store.where() != run.where():
        print(f"{name} is told nothing of evaluations: they lie outside of the run. They are in the report.")
        return lambda step, found: None
    return lambda step, found: leave_sheet(run, step, found)


def scalars(step: int, found: list[Evaluation]) -> dict[str, float]:
    """Name → value, of each metric and the ends of its interval; the metric's id is in its name."""
    rows = [(each.setting, row) for each in found if each.step == step for row in each.rows]
    return {
        f"evaluation/{row['metric']}/{setting} {row['id'][:8]}{end and ' ' + end}": row[end or "value"]
        for setting, row in rows
        for end in ("", "low", "high")
    }


def images(step: int, found: list[Evaluation]) -> dict[str, Image.Image]:
    """Name → picture: of each sample set of the step a grid, and a strip for each of its first prompts."""
    drawn = {}
    for each in [each for each in found if each.step == step]:
        shown = first_pictures(each.place, GRID, SIDE)
        drawn[f"evaluation/samples/{each.setting}"] = grid([one.picture for one in shown], COLUMNS)
        earlier = [other for other in found if other.setting == each.setting and other.step <= step]
        for prompt, strip in strips(earlier, PROMPTS).items():
            drawn[f"evaluation/strips/{each.setting}/{prompt}"] = strip
    return drawn


def strips(found: list[Evaluation], count: int) -> dict[str, Image.Image]:
    """Prompt's id → its pictures over the steps of one setting."""
    steps = {each.step: each for each in found}
    pictures: dict[str, dict[str, Image.Image]] = {}
    for step in spread(sorted(steps), MOST_STEPS):
        for one in first_pictures(steps[step].place, count, SIDE):
            pictures.setdefault(one.prompt.id, {})[f"step {step}"] = one.picture
    return {prompt: side_by_side(its) for prompt, its in pictures.items()}


def to_tensorboard(store: Store, step: int, found: list[Evaluation]) -> None:
    """One file of events, whole or not at all."""
    from torch.utils.tensorboard import SummaryWriter

    values = scalars(step, found)
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        with SummaryWriter(folder) as writer:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            for name, picture in images(step, found).items():
                writer.add_image(name, np.asarray(picture), step, dataformats="HWC")
        (path,) = Path(folder).iterdir()
        store.create(EVENTS.format(step=step, names=hash_names(values)), path.read_bytes())


def leave_sheet(run: Store, step: int, found: list[Evaluation]) -> None:
    """For the run's own launches, which tell its tracker."""
    values, packed = scalars(step, found), BytesIO()
    with ZipFile(packed, "w") as sheet:
        sheet.writestr("values.json", json.dumps({"step": step, "values": values}))
        for name, picture in images(step, found).items():
            with sheet.open(f"{name}.png", "w") as member:
                picture.save(member, "PNG")
    run.create(f"{SHEETS}/{SHEET.format(step=step, names=hash_names(values))}", packed.getvalue())


def tell_rest(run: Store, name: str) -> None:
    """Have a launch of the run's own tell its tracker of sheets that came after training had ended, if there are any.

    `name`: the run, as the user named it.
    """
    files = set(run.files(SHEETS))
    if any(file.endswith(".zip") and file.removesuffix(".zip") + TOLD not in files for file in files):
        words = [sys.executable, "-m", "train", "tell", name]
        result = subprocess.run(words, capture_output=True, text=True)
        print((result.stdout or result.stderr).strip(), flush=True)


def hash_names(values: dict[str, float]) -> str:
    """Of the curves that a step is told of."""
    return hashlib.sha256(" ".join(sorted(values)).encode()).hexdigest()[:8]
