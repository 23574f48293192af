"""What `evaluate watch` found, told to the run's tracker by the run itself: a tracker's run has one writer.

With two, wandb loses rows of one of them (its issues 10349 and 12269). So a watcher leaves a sheet of each checkpoint
in the run, and the launch that trains tells of them, one at each line of metrics.jsonl. Those that come after training
has ended, `python -m train tell RUN` tells.

RUN/tracker/evaluations/0000001000.3f2a9c1d.zip         a sheet: values.json, with the step, and pictures
                       /0000001000.3f2a9c1d.told.json   the tracker has it
"""

import json
import threading
from contextlib import suppress
from io import BytesIO
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import numpy as np
from PIL import Image

from shards.base.errors import Outage
from shards.base.store import Place, Store
from shards.open import open_store
from train.run.telling.tracker import STEP

FOLDER = "tracker/evaluations"
SHEET, TOLD = ".zip", ".told.json"
TOLD_BY_WATCHERS = ("none", "tensorboard")
"""Trackers for which no sheets are left: TensorBoard reads files of any number of writers."""
EVERY = 30.0
"""Seconds between looks for sheets."""


class Sheet(NamedTuple):
    """What a watcher found of one checkpoint."""

    name: str
    """In FOLDER, without SHEET."""
    step: int
    values: dict[str, float]
    pictures: dict[str, np.ndarray[Any, Any]]
    """Name → uint8, (height, width, 3)."""


def untold(store: Store) -> list[str]:
    """Sheets of a run that its tracker has not, in the order of their steps."""
    files = store.files(FOLDER)
    told = {name.removesuffix(TOLD) for name in files if name.endswith(TOLD)}
    return [stem for name in files if name.endswith(SHEET) and (stem := name.removesuffix(SHEET)) not in told]


def read_sheet(store: Store, name: str) -> Sheet | None:
    """None where it is damaged, or from elsewhere; that is said."""
    try:
        with ZipFile(BytesIO(store.read(f"{FOLDER}/{name}{SHEET}"))) as packed:
            content = json.loads(packed.read("values.json"))
            pictures = {
                member.removesuffix(".png"): np.asarray(Image.open(packed.open(member)).convert("RGB"))
                for member in packed.namelist()
                if member.endswith(".png")
            }
        return Sheet(name, content["step"], content["values"], pictures)
    except (BadZipFile, KeyError, ValueError) as error:
        print(f"{store.where(f'{FOLDER}/{name}{SHEET}')} is damaged, and the tracker is not told of it: {error}")
        return None


def tell(trackers: list[Any], sheet: Sheet, now: int) -> None:
    """Tell accelerate's trackers of a checkpoint. `now`: wandb's own step, which does not go back."""
    for tracker in trackers:
        step = now if tracker.name == "wandb" else sheet.step
        tracker.log({STEP: sheet.step, **sheet.values}, step=step)
        if hasattr(tracker, "log_images"):
            tracker.log_images({name: [picture] for name, picture in sheet.pictures.items()}, step=step)


class Evaluations:
    """Sheets of a run that trains. A context manager: while it is open, a thread of its own looks for them."""

    def __init__(self, run: Place):
        self.store = open_store(run)
        self.seen: set[str] = set()
        self.found: SimpleQueue[Sheet] = SimpleQueue()
        self.told: SimpleQueue[str] = SimpleQueue()
        self.left = threading.Event()
        self.thread = threading.Thread(target=self._look_now_and_then, name="evaluations", daemon=True)

    def __enter__(self) -> "Evaluations":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.left.set()
        self.thread.join()

    def tell_next(self, trackers: list[Any], now: int) -> None:
        """One sheet, where there is any: in a step of wandb's there is room for one."""
        with suppress(Empty):
            sheet = self.found.get_nowait()
            tell(trackers, sheet, now)
            self.told.put(sheet.name)

    def _look_now_and_then(self) -> None:
        while True:
            try:
                self._note()
                if self.left.is_set():
                    return
                self._look()
            except (OSError, Outage) as error:  # the next look finds them
                print(f"evaluations of {self.store.where()} are not told of yet: {error}", flush=True)
                if self.left.is_set():
                    return
            self.left.wait(EVERY)

    def _look(self) -> None:
        for name in untold(self.store):
            if name not in self.seen:
                sheet = read_sheet(self.store, name)
                self.seen.add(name)
                if sheet is not None:
                    self.found.put(sheet)

    def _note(self) -> None:
        with suppress(Empty):
            while True:
                note_told(self.store, self.told.get_nowait())


def note_told(store: Store, name: str) -> None:
    """The tracker has this sheet."""
    store.create(f"{FOLDER}/{name}{TOLD}", b"{}")
