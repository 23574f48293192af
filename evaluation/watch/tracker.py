"""Log evaluations to a run's tracker: metric curves and images of fixed prompts, at the checkpoint's step.

For TensorBoard, one event file per step is created in a separate folder. TensorBoard reads only one file per folder at
a time, so an event file in the trainer's folder would make it stop reading the trainer's own file. For any other
tracker, a *results file* is created in the run, and the trainer logs it (`train/run/reporting/evaluations.py`). If a
second process wrote to a wandb run, it would overwrite what the first one wrote, even in shared mode (wandb issues
10349 and 12269).

    RUN/tracker/evaluations/0000001000.3f2a9c1d.zip    contains values.json (step and values) and a PNG for each image
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import numpy as np
from PIL import Image

from cluster.start import forget_ranks
from evaluation.report.pictures import first_pictures, grid, side_by_side, spread
from evaluation.report.runs import LINES, Evaluation
from shards.base.errors import RequestError
from shards.base.store import Store
from shards.open import open_store
from train.run.recorded import run_config

STRIP_PROMPTS = 4
"""Number of prompts shown as strips. A strip shows a prompt's images at successive steps side by side."""
MAX_STRIP_STEPS = 12
"""Maximum number of images in a strip."""
GRID_PICTURES, GRID_COLUMNS = 16, 4
SIDE = 256
"""Maximum side length of a logged image, in pixels."""
FOLDER = "tracker/evaluations"
EVENTS = "tracker/evaluations/events.out.tfevents.{step:010d}.{names}"
RESULTS = "{step:010d}.{names}.zip"

LogStep = Callable[[int, list[Evaluation]], None]
"""Function that logs a step to a tracker, given all evaluations of the run."""


def open_tracker(run: Store, output: Path | str) -> LogStep:
    """Return the function that logs a step's evaluations from `output` to the tracker named in the run's config.

    Raises:
        RequestError: the run has no config.yaml, or it cannot be parsed.
    """
    name = run_config(run).get("log", {}).get("tracker", "none")
    store, reason = open_store(output), ""
    if name == "tensorboard":
        if find_spec(name) is not None:
            return partial(write_events, store)
        reason = f"{name} is not installed here"
    elif name != "none":
        if store.where() == run.where():
            return partial(write_results, run)
        reason = "--output is outside the run"
    if reason:
        print(f"Evaluations are not logged to {name}, because {reason}. Their metrics are in {store.where(LINES)}.")
    return lambda step, found: None


def scalars(step: int, found: list[Evaluation]) -> dict[str, float]:
    """Return a dict from curve name to value, with three curves for each of a step's metrics: value, low and high.

    Names contain the start of the metric's id, so values with different ids never share a curve.
    """
    values: dict[str, float] = {}
    for evaluation in (each for each in found if each.step == step):
        for row in evaluation.rows:
            name = f"evaluation/{row['metric']}/{evaluation.title} {row['id'][:8]}"
            values |= {name: row["value"], f"{name} low": row["low"], f"{name} high": row["high"]}
    return values


def images(step: int, found: list[Evaluation]) -> dict[str, Image.Image]:
    """Return a dict from name to image, with a grid and several strips for each of a step's sample sets."""
    drawn = {}
    for evaluation in (each for each in found if each.step == step):
        shown = first_pictures(evaluation.place, GRID_PICTURES, SIDE)
        if shown:  # images may have been deleted or replaced in the meantime
            drawn[f"evaluation/samples/{evaluation.title}"] = grid(list(shown.values()), GRID_COLUMNS)
        earlier = [other for other in found if other.title == evaluation.title and other.step <= step]
        for prompt_id, strip in strips(earlier, STRIP_PROMPTS).items():
            drawn[f"evaluation/strips/{evaluation.title}/{prompt_id}"] = strip
    return drawn


def strips(found: list[Evaluation], count: int) -> dict[str, Image.Image]:
    """Return a dict from prompt id to a strip of the prompt's images at successive steps, for `count` prompts."""
    by_step = {evaluation.step: evaluation for evaluation in found}
    pictures: dict[str, dict[str, Image.Image]] = {}
    for step in spread(sorted(by_step), MAX_STRIP_STEPS):
        for prompt, picture in first_pictures(by_step[step].place, count, SIDE).items():
            pictures.setdefault(prompt.id, {})[f"step {step}"] = picture
    return {prompt_id: side_by_side(by_label) for prompt_id, by_label in pictures.items()}


def write_events(store: Store, step: int, found: list[Evaluation]) -> None:
    """Create a step's TensorBoard event file atomically."""
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


def write_results(run: Store, step: int, found: list[Evaluation]) -> None:
    """Create a step's results file, which the trainer will log to the run's tracker."""
    values, content = scalars(step, found), BytesIO()
    with ZipFile(content, "w") as archive:
        archive.writestr("values.json", json.dumps({"step": step, "values": values}))
        for name, picture in images(step, found).items():
            with archive.open(f"{name}.png", "w") as member:
                picture.save(member, "PNG")
    run.create(f"{FOLDER}/{RESULTS.format(step=step, names=hash_names(values))}", content.getvalue())


def log_remaining_results(run: Store, name: str) -> None:
    """Log the results files that the trainer had not logged to the tracker when it ended, as `python -m train tell`
    does. If that fails, print why."""
    from train.run.reporting.evaluations import list_unlogged  # these import accelerate
    from train.run.reporting.notify import log_remaining

    if not list_unlogged(run):
        return
    forget_ranks()  # with a launcher's variables, accelerate would wait for other processes
    try:
        print(log_remaining([name]), flush=True)
    except RequestError as error:  # for example, training continues
        print(
            f"Some evaluations are not in the run's tracker yet. {error} If they are still missing after the end of "
            f"training, run `python -m train tell {name}`.",
            file=sys.stderr,
            flush=True,
        )
    except Exception as error:  # each tracker's client raises its own exceptions
        reason = f"{type(error).__name__}: {error}"
        print(
            f"warning: not all evaluations are in the run's tracker, because logging them failed ({reason}). Their "
            f"results files are kept. Fix the error and run `python -m train tell {name}`.",
            file=sys.stderr,
            flush=True,
        )


def hash_names(values: dict[str, float]) -> str:
    """Return 8 hex digits that identify a step's set of curves."""
    return hashlib.sha256(" ".join(sorted(values)).encode()).hexdigest()[:8]
