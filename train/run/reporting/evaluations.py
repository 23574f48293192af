"""What `evaluation watch` found, told to the run's tracker by the run itself: a tracker's run has one writer.

With two, wandb loses rows of one of them (its issues 10349 and 12269). So a watcher leaves a sheet of each checkpoint
in the run, and the launch that trains tells of them, one at each line of metrics.jsonl. Those that come after training
has ended, `python -m train tell RUN` tells.

RUN/tracker/evaluations/0000001000.3f2a9c1d.zip         a sheet: values.json, with the step, and pictures
                       /0000001000.3f2a9c1d.told.json   the tracker has it
"""

import json
import tempfile
import threading
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from zipfile import ZipFile

from shards.base.errors import Outage
from shards.base.store import Place, Store
from shards.open import open_store
from train.run.reporting.tracker import STEP

FOLDER = "tracker/evaluations"
SHEET, TOLD = ".zip", ".told.json"
TOLD_BY_WATCHERS = ("none", "tensorboard")
"""Trackers for which no sheets are left: TensorBoard reads files of any number of writers."""
EVERY = 30.0
"""Seconds between looks for sheets."""
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
"""The signature of a PNG, and its last chunk's type and checksum."""


class Sheet(NamedTuple):
    """What a watcher found of one checkpoint."""

    name: str
    """In FOLDER, without SHEET."""
    step: int
    values: dict[str, float]
    pictures: dict[str, bytes]
    """Name → PNG, as evaluation encoded it. The trainer never decodes a picture."""


def untold(store: Store) -> list[str]:
    """Sheets of a run that its tracker has not, in the order of their steps."""
    files = store.files(FOLDER)
    told = {name.removesuffix(TOLD) for name in files if name.endswith(TOLD)}
    return [stem for name in files if name.endswith(SHEET) and (stem := name.removesuffix(SHEET)) not in told]


def read_sheet(store: Store, name: str) -> Sheet | None:
    """Read a sheet, without its damaged pictures; return None if its numbers are damaged. Both are printed.

    Raises:
        OSError, Outage: the sheet cannot be read now. Damaged content never raises either of them.
    """
    where, content = store.where(f"{FOLDER}/{name}{SHEET}"), store.read(f"{FOLDER}/{name}{SHEET}")
    try:
        with ZipFile(BytesIO(content)) as packed:
            step, values = check_numbers(json.loads(packed.read("values.json")))
            pictures = {}
            for member in packed.namelist():
                if member.endswith(".png"):
                    try:
                        pictures[member.removesuffix(".png")] = check_png(packed.read(member))
                    except Exception as error:  # as below
                        print(f"{member} in {where} is damaged and is not sent to the tracker: {error}", flush=True)
    except Exception as error:  # the bytes are in memory: whatever the parsers raise, the content is at fault
        print(f"{where} is damaged, and the tracker is not told of it: {error!r}", flush=True)
        return None
    return Sheet(name, step, values, pictures)


def check_numbers(content: Any) -> tuple[int, dict[str, float]]:
    """Return the step and the values of a sheet's values.json.

    Raises:
        ValueError, KeyError, TypeError: it has a different structure.
    """
    step, values = content["step"], content["values"]
    if not isinstance(step, int) or not all(isinstance(value, int | float) for value in values.values()):
        raise ValueError("values.json does not hold a step and a number for each name")
    return step, values


def check_png(content: bytes) -> bytes:
    """Return the bytes of a PNG after comparing both ends of the file, which is possible without an image library.

    Raises:
        ValueError: the bytes are no PNG, or a truncated one.
    """
    if not content.startswith(PNG_START) or not content.endswith(PNG_END):
        raise ValueError(f"its {len(content)} bytes are not a complete PNG")
    return content


def tell(trackers: list[Any], sheet: Sheet, now: int) -> None:
    """Tell accelerate's trackers of a checkpoint. `now`: wandb's own step, which does not go back.

    A picture that a tracker rejects is reported and skipped: it must end neither the training nor the other points.
    """
    for tracker in trackers:
        step = now if tracker.name == "wandb" else sheet.step
        tracker.log({STEP: sheet.step, **sheet.values}, step=step)
        for name, png in sheet.pictures.items():
            try:
                send_picture(tracker, name, png, step)
            except Exception as error:  # of any type: each tracker's client raises its own
                print(f"{tracker.name} did not take {name} of step {sheet.step}: {error!r}", flush=True)


def send_picture(tracker: Any, name: str, png: bytes, step: int) -> None:
    """Send a PNG file to a tracker whose client takes files and copies them before it returns; skip other trackers."""
    if tracker.name not in ("wandb", "swanlab", "aim", "mlflow"):
        return
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        path = Path(folder) / f"{step:010d}.png"
        path.write_bytes(png)
        if tracker.name == "mlflow":
            tracker.log_artifact(str(path), name)
        else:  # accelerate gives aim the value itself, and the others each item of a list
            tracker.log_images({name: str(path) if tracker.name == "aim" else [str(path)]}, step=step)


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
        """Queue new sheets. One that cannot be read does not hold back the others; the next look tries it again."""
        failed: OSError | None = None
        for name in untold(self.store):
            if name not in self.seen:
                try:
                    sheet = read_sheet(self.store, name)
                except OSError as error:
                    failed = error
                    continue
                self.seen.add(name)
                if sheet is not None:
                    self.found.put(sheet)
        if failed is not None:
            raise failed

    def _note(self) -> None:
        with suppress(Empty):
            while True:
                note_told(self.store, self.told.get_nowait())


def note_told(store: Store, name: str) -> None:
    """The tracker has this sheet."""
    store.create(f"{FOLDER}/{name}{TOLD}", b"{}")
