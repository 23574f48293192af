"""What a run's tracker is told of evaluations: curves, and pictures of fixed prompts, at the checkpoint's own step.

TensorBoard gets a file for each step, created if absent, in a folder of its own: it reads one file of a folder at a
time, and would lose sight of the trainer's. wandb gets a run of its own for each watcher, in the group of the training:
a second process that writes to a run overwrites what the first one wrote, in wandb's shared mode too (its issues 10349
and 12269). Which of them tells of a step, a file decides that is created if absent.
"""

import hashlib
import tempfile
import uuid
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from evaluate.parts import create_once, read_sealed
from evaluate.report.pictures import first_pictures, grid, side_by_side, spread
from evaluate.report.records import Evaluation, run_config
from shards.base.store import Store
from shards.open import open_store

PROMPTS, GRID, COLUMNS = 4, 16, 4
"""With a strip each, and in a grid."""
MOST_STEPS, SIDE = 12, 256
"""Of a strip, and of a picture in pixels."""
EVENTS = "tracker/evaluations/events.out.tfevents.{step:010d}.{names}"
TOLD = "tracker/evaluations/wandb.{step:010d}.{names}.json"
WANDB_PROJECT = "tracker"
"""Of runs whose config names none."""

Track = Callable[[int, list[Evaluation]], None]


def open_tracker(run: Store, output: Path | str) -> Track:
    """What tells the tracker of the run's own config (`log.tracker`) of a step, given all evaluations."""
    log = run_config(run).get("log", {})
    name = log.get("tracker", "none")
    if name in ("tensorboard", "wandb") and find_spec(name) is None:
        print(f"{name} is told nothing of evaluations: it is not installed here. They are in the report.")
        return lambda step, found: None
    if name == "tensorboard":
        return lambda step, found: to_tensorboard(open_store(output), step, found)
    if name == "wandb":
        return Wandb(open_store(output), run.where(), log.get("project", WANDB_PROJECT))
    if name != "none":
        print(f"{name} is told nothing of evaluations: only tensorboard and wandb are. They are in the report.")
    return lambda step, found: None


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


def hash_names(values: dict[str, float]) -> str:
    """Of the curves that a step is told of."""
    return hashlib.sha256(" ".join(sorted(values)).encode()).hexdigest()[:8]


class Wandb:
    """A run of wandb's for this watcher, begun at the first step that it tells of."""

    def __init__(self, store: Store, group: str, project: str):
        """`store`: holds evaluations/; `group`: the training's run folder."""
        self.store, self.group, self.project = store, group, project
        self.token = uuid.uuid4().hex
        self.run: Any = None

    def __call__(self, step: int, found: list[Evaluation]) -> None:
        import wandb

        values = scalars(step, found)
        told = TOLD.format(step=step, names=hash_names(values))
        if read_sealed(self.store, told) is not None:
            return
        pictures = {name: wandb.Image(picture) for name, picture in images(step, found).items()}
        if self.run is None:
            self.run = wandb.init(project=self.project, group=self.group, job_type="evaluate")
            self.run.define_metric("evaluation/*", step_metric="evaluation/step")
        # another watcher may have been faster; who is killed before this line has told nothing
        if create_once(self.store, told, lambda: {"by": self.token})["by"] == self.token:
            self.run.log({"evaluation/step": step, **values, **pictures})
