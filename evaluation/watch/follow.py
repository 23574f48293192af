"""The loop of `evaluation watch`: which checkpoints are whole and due, and each of them evaluated once.

    RUN/checkpoints/step-00001000/                        the trainer's; only read
    RUN/evaluations/step-00001000-auto/evaluated-ID.json  this step is done, under this config

Watchers do not exclude each other. Two at work on one step share its parts, and each part, number and receipt is
created by one of them alone; the other takes what is there.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from evaluation.parts import create_once, read_sealed
from evaluation.report.records import FOLDER, STEP_FOLDER, Evaluation, run_config, step_place, write_lines
from evaluation.sampling.job import below
from evaluation.sampling.model import EXPORTED, STATE, checkpoints_in, drop_export, is_exported
from shards.base.config import Config
from shards.base.durable import DamagedFile, canonical_json
from shards.base.errors import Preempted, RequestError, WorkError, say
from shards.base.stop import StopSignal
from shards.base.store import Store
from shards.open import open_store

TRIES = 3
"""At a checkpoint as it lies there; one that is written anew has as many again."""


class FollowConfig(Config):
    """Which checkpoints of a run are evaluated, and for how long it is followed."""

    every: int | None = Field(None, ge=1)
    """Checkpoints of steps that this divides, and the run's last; null: as the run's `evaluate.every` asks, or all."""
    until: int | None = Field(None, ge=0)
    """The last step; null: the run's `max_steps`."""
    once: bool = False
    """Evaluate what is there, and end."""
    poll_seconds: float = Field(30.0, gt=0)
    """Between looks at the run folder."""
    keep_models: bool = False
    """Keep each checkpoint's exported pipeline once its pictures are drawn and measured."""


@dataclass
class Follower:
    run: Store
    output: Path | str
    """Holds evaluations/: the run itself, or a place of its own."""
    config: FollowConfig
    weights: str
    settings: dict[str, Any]
    """What the evaluation of a step depends on, but for the step."""
    evaluate: Callable[[int, Path | str], None]
    """Draw and measure a step at a place; what is there is not made again."""
    track: Callable[[int, list[Evaluation]], None]
    """Tell the tracker of a step, given all evaluations."""
    tell_rest: Callable[[], None]
    """Called once no step is left."""
    tried: Counter[tuple[int, str]] = field(default_factory=Counter)
    failed: dict[int, str] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    merged: set[int] = field(default_factory=set)
    """Steps that are done and in evaluations.jsonl, as far as this watcher knows."""

    def follow(self) -> None:
        """Until the run's last step is evaluated, or what is there, where that was asked for.

        Raises:
            Preempted: told to leave.
            RequestError: the folder is no run, or the evaluation is not possible as asked for.
            WorkError: checkpoints could not be evaluated; the others are.
        """
        ended = False
        while not ended:
            with StopSignal() as stop:
                ended, waited = self.look(stop), time.monotonic() + self.config.poll_seconds
                while not ended and not stop.received and time.monotonic() < waited:
                    time.sleep(0.1)
            if stop.received:
                raise Preempted(f"told to leave {self.run.where()}. The same command goes on.")
        self.tell_rest()
        if self.failed:
            steps = "; ".join(f"step {step}: {reason}" for step, reason in sorted(self.failed.items()))
            raise WorkError(
                f"{len(self.failed)} checkpoints of {self.run.where()} were not evaluated ({steps}). The others are. "
                f"The same command again tries just these."
            )

    def look(self, stop: StopSignal) -> bool:
        """Evaluate what is due now; whether the last step is behind us."""
        wanted = read_wants(self.run)
        every, last = self.config.every or wanted.every, wanted.last if self.config.until is None else self.config.until
        entries = self.run.listing("checkpoints")
        steps = checkpoints_in(list(entries))
        if not steps:
            self._say_once(f"{self.run.where()} has no checkpoint yet: waiting for one.")
        # of an exported one the trainer may have dropped the checkpoint since
        found = {step: EXPORTED for step in self._begun()} | {
            step: json.dumps(sorted((name, entries[name].etag) for name in files)) for step, files in steps.items()
        }
        due = (step for step in sorted(found) if step <= last and (step % every == 0 or step == wanted.last))
        stamps = {step: found[step] for step in due}
        adopted = [step for step in stamps if step not in self.merged and self._is_done(step)]
        if adopted:
            write_lines(self.output)
        for step, stamp in stamps.items():
            if step in adopted or (step not in self.merged and not stop.received and self._evaluate(step, stamp)):
                self._tidy(step)
        left = [s for s, stamp in stamps.items() if s not in self.merged and self.tried[s, stamp] < TRIES]
        return self.config.once or (max(steps, default=-1) >= last and not left)

    def _is_ready(self, step: int, stamp: str) -> bool:
        if self.tried[step, stamp] >= TRIES:
            return False
        if not self._is_exported(step) and not is_whole(self.run, step):
            self._say_once(f"step {step} of {self.run.where()} is not whole yet: passed over until it is.")
            return False
        return True

    def _evaluate(self, step: int, stamp: str) -> bool:
        """Whether the step is done afterwards; if not, why is said."""
        if not self._is_ready(step, stamp):
            return False
        self.tried[step, stamp] += 1
        try:
            self.evaluate(step, step_place(self.output, step, self.weights))
            self._conclude(step)
        except Preempted:
            raise
        except (RequestError, WorkError) as error:
            if self._is_done(step):  # by another watcher, which tidied up after itself
                write_lines(self.output)
                return True
            if step not in checkpoints_in(self.run.files("checkpoints")) and not self._is_exported(step):
                self.failed.pop(step, None)
                print(f"step {step} of {self.run.where()} was removed while it was read: skipped.", flush=True)
                return False
            if isinstance(error, RequestError):
                raise
            self.failed[step] = str(error)
            say(error)
            return False
        self.failed.pop(step, None)
        return True

    def _conclude(self, step: int) -> None:
        """Lines, tracker, and then the receipt: a watcher that dies in between does all of it again."""
        found = write_lines(self.output)
        if not self._is_done(step):
            self.track(step, [each for each in found if each.weights == self.weights])
            place = step_place(self.output, step, self.weights)
            create_once(open_store(place), self._receipt, lambda: {"step": step, "settings": self.settings})

    def _tidy(self, step: int) -> None:
        if not self.config.keep_models:
            drop_export(open_store(step_place(self.output, step, self.weights)))
        self.merged.add(step)

    def _begun(self) -> list[int]:
        """Steps of which a watcher has exported the model, and not said that they are done."""
        names = open_store(below(self.output, FOLDER)).entries()
        matches = (STEP_FOLDER.fullmatch(name) for name in names)
        steps = [int(match[1]) for match in matches if match and match[2] == self.weights]
        return [step for step in steps if step not in self.merged and self._is_exported(step)]

    def _is_exported(self, step: int) -> bool:
        return is_exported(open_store(step_place(self.output, step, self.weights)))

    def _is_done(self, step: int) -> bool:
        return read_sealed(open_store(step_place(self.output, step, self.weights)), self._receipt) is not None

    @property
    def _receipt(self) -> str:
        return f"evaluated-{hashlib.sha256(canonical_json(self.settings)).hexdigest()[:12]}.json"

    def _say_once(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            print(text, flush=True)


@dataclass(frozen=True)
class Wants:
    """What a run's own config says."""

    every: int
    last: int


def read_wants(run: Store) -> Wants:
    """Of the run's config.yaml.

    Raises:
        RequestError: it has none.
    """
    content = run_config(run)
    return Wants((content.get("evaluate") or {}).get("every") or 1, content["max_steps"])


def is_whole(run: Store, step: int) -> bool:
    """Whether every file that a checkpoint names is there. What they hold is checked when it is exported."""
    files = checkpoints_in(run.files("checkpoints")).get(step)
    if files is None:
        return False
    folder = files[0].partition("/")[0]
    try:
        content = read_sealed(run, f"checkpoints/{folder}/{STATE}")
    except DamagedFile:
        return False
    return content is not None and {f"{folder}/{name}" for name in content["files"]} <= set(files)
