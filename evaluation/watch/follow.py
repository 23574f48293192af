"""`python -m evaluation watch`: evaluate each due checkpoint of a run once, while training continues.

    RUN/checkpoints/step-00001000/                        written by the trainer; only read here
    RUN/evaluations/step-00001000-auto/evaluated-ID.json  receipt: this step was evaluated with this config

Any number of watchers may follow a run, without locks. Watchers on the same step share its parts: exactly one of them
creates each part, metric record and receipt, and the others use it.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from evaluation.parts import create_once, read_sealed
from evaluation.report.runs import FOLDER, SET_FOLDER, STEP_FOLDER, Evaluation, step_place, write_lines
from evaluation.sampling.model import EXPORTED, STATE, checkpoints_in, drop_export, is_exported
from evaluation.sampling.sets import below, is_unfinished
from shards.base.config import Config
from shards.base.durable import DamagedFile, canonical_json
from shards.base.errors import Outage, Preempted, RequestError, WorkError, say
from shards.base.stop import StopSignal
from shards.base.store import Store
from shards.open import open_store
from train.run.recorded import run_config

MAX_ATTEMPTS = 3
"""Maximum number of attempts to evaluate a checkpoint. The count restarts if the checkpoint's files are rewritten."""

MAX_OUTAGE_SECONDS = 15 * 60.0
"""Duration of an outage after which a watcher gives up. If the outage prevents only the evaluation of a checkpoint, the
watcher gives up that checkpoint."""


class FollowConfig(Config):
    """Choosing the checkpoints of a run to evaluate, and waiting for them."""

    every: int | None = Field(None, ge=1)
    """Evaluate checkpoints whose step is a multiple of this, and the run's last checkpoint. null: `evaluate.every` in
    the run's config, or all checkpoints if it is not set."""
    until: int | None = Field(None, ge=0)
    """Last step to evaluate, after which watching ends. Values above the run's `max_steps` have no effect. null:
    `max_steps`."""
    once: bool = False
    """Evaluate the checkpoints that exist now, then exit."""
    poll_seconds: float = Field(30.0, gt=0)
    """Seconds between checks for new checkpoints."""
    keep_models: bool = False
    """Keep the exported pipeline of each checkpoint after its evaluation."""


@dataclass
class WatchedCheckpoint:
    """A watcher's state for one checkpoint."""

    step: int
    place: Path | str
    """Folder or URL of the checkpoint's evaluation: sample sets, the exported model and the receipt."""
    version: str = ""
    """Identifier of the checkpoint's files, which changes if they are rewritten."""
    changed: float = 0.0
    """Time at which this version was first seen, by the monotonic clock."""
    attempts: int = 0
    """Number of attempts to evaluate this version. Those that an outage of less than MAX_OUTAGE_SECONDS ended do not
    count."""
    outage_began: float | None = None
    """Time at which an outage first ended an attempt, by the monotonic clock; None if the last attempt had none."""
    failure: str | None = None
    """Error from the last attempt; None if that attempt succeeded or there was none."""
    is_done: bool = False
    """Whether the step has been evaluated and its metrics are in evaluations.jsonl."""
    is_reported_incomplete: bool = False

    @property
    def is_pending(self) -> bool:
        """Whether the checkpoint still needs to be evaluated and has attempts left."""
        return not self.is_done and self.attempts < MAX_ATTEMPTS

    def is_exported(self) -> bool:
        """Return whether the checkpoint's model has been exported, so the checkpoint itself is no longer needed."""
        return is_exported(open_store(self.place))


@dataclass
class Follower:
    """The main loop of `evaluation watch`."""

    run: Store
    output: Path | str
    """Folder or URL that contains evaluations/: the run itself, or a separate location."""
    config: FollowConfig
    weights: str
    settings: dict[str, Any]
    """Everything that an evaluation depends on, except the step."""
    evaluate: Callable[[int, Path | str], None]
    """Function that samples and scores a step at the given location, without recomputing existing results."""
    log_step: Callable[[int, list[Evaluation]], None]
    """Function that logs a step to the run's tracker, given all evaluations of the run."""
    log_remaining: Callable[[], None]
    """Function that is called once after the last step, to log results that have not been logged yet."""
    checkpoints: dict[int, WatchedCheckpoint] = field(default_factory=dict)
    """Step → checkpoint, for all steps seen so far."""
    is_reported_empty: bool = False
    outage_began: float | None = None
    """Time of the first failure since storage last worked, by the monotonic clock. None: there was none."""

    def follow(self) -> None:
        """Evaluate checkpoints until the run's last step is done, or only the existing ones if `once` is set.

        Raises:
            Preempted: a stop signal arrived.
            RequestError: the folder is not a run, or the requested evaluation is impossible.
            Outage: storage failed and did not recover within MAX_OUTAGE_SECONDS.
            WorkError: some checkpoints could not be evaluated; all others have been evaluated.
        """
        is_over = False
        while not is_over:
            with StopSignal() as stop:
                is_over = self._poll_despite_outages(stop)
                next_poll = time.monotonic() + self.config.poll_seconds
                while not is_over and not stop.received and time.monotonic() < next_poll:
                    time.sleep(0.1)
            if stop.received:
                raise Preempted(
                    f"A stop signal ended the evaluation of {self.run.where()}. All finished work was saved; run the "
                    f"same command again to continue."
                )
        self.log_remaining()
        failures = {step: each.failure for step, each in sorted(self.checkpoints.items()) if each.failure is not None}
        if failures:
            reasons = "; ".join(f"step {step}: {failure}" for step, failure in failures.items())
            count = "1 checkpoint" if len(failures) == 1 else f"{len(failures)} checkpoints"
            raise WorkError(
                f"{count} in {self.run.where()} could not be evaluated ({reasons}). All others were evaluated. Run the "
                f"same command again to retry only the failed ones."
            )

    def _poll_despite_outages(self, stop: StopSignal) -> bool:
        """Call `poll`. If storage fails temporarily, report the error and return False, so that the caller retries.

        Raises:
            Outage: the failure is permanent, has lasted for MAX_OUTAGE_SECONDS, or `once` is set.
            Preempted, RequestError: see `follow`.
        """
        try:
            is_over = self.poll(stop)
        except Outage as error:
            now = time.monotonic()
            if self.outage_began is None:
                self.outage_began = now
            if self.config.once or not error.is_transient or now - self.outage_began >= MAX_OUTAGE_SECONDS:
                raise
            say(error)
            print(f"The watcher tries again in {self.config.poll_seconds:g} s.", file=sys.stderr, flush=True)
            return False
        self.outage_began = None
        return is_over

    def poll(self, stop: StopSignal) -> bool:
        """Evaluate every checkpoint that is due now, and return whether watching is over.

        Raises:
            Outage: storage failed.
            Preempted, RequestError: see `follow`.
        """
        now = time.monotonic()
        every, final = read_schedule(self.run)
        every = self.config.every or every
        last = final if self.config.until is None else min(self.config.until, final)
        entries = self.run.listing("checkpoints")
        files = checkpoints_in(list(entries))
        if not files and not self.is_reported_empty:
            self.is_reported_empty = True
            print(f"{self.run.where()} has no checkpoint yet; waiting for the first one.", flush=True)

        versions = self._exported()  # the trainer may have pruned a checkpoint after it was exported
        for step, names in files.items():
            versions[step] = json.dumps(sorted((name, entries[name].etag) for name in names))
        due = []
        for step, version in sorted(versions.items()):
            if step <= last and (step % every == 0 or step == final):
                due.append(checkpoint := self._checkpoint(step))
                if checkpoint.version != version:
                    checkpoint.version, checkpoint.changed, checkpoint.attempts = version, now, 0
                    checkpoint.outage_began = None

        evaluated = [checkpoint for checkpoint in due if not checkpoint.is_done and self._has_receipt(checkpoint)]
        if evaluated:
            write_lines(self.output)
        for checkpoint in evaluated:
            self._finish(checkpoint)
        is_complete_run, outage = max(files, default=-1) >= last, None
        for checkpoint in due:
            # until then, the run may still be being copied
            gives_up = is_complete_run and (self.config.once or now - checkpoint.changed >= MAX_OUTAGE_SECONDS)
            try:
                if checkpoint.is_pending and not stop.received and self._evaluate(checkpoint, gives_up):
                    self._finish(checkpoint)
            except Outage as error:  # it may affect only this checkpoint, for example if its files were archived
                outage = outage or error
        if outage is not None:
            raise outage
        return self.config.once or (is_complete_run and not any(checkpoint.is_pending for checkpoint in due))

    def _checkpoint(self, step: int) -> WatchedCheckpoint:
        place = step_place(self.output, step, self.weights)
        return self.checkpoints.setdefault(step, WatchedCheckpoint(step, place))

    def _has_receipt(self, checkpoint: WatchedCheckpoint) -> bool:
        """Return whether this or any other watcher has evaluated the step with the current config."""
        return read_sealed(open_store(checkpoint.place), self._receipt) is not None

    def _exported(self) -> dict[int, str]:
        """Return a dict from step to version for each unfinished step whose model any watcher has exported."""
        matches = map(STEP_FOLDER.fullmatch, open_store(below(self.output, FOLDER)).entries())
        exported = [self._checkpoint(int(match[1])) for match in matches if match and match[2] == self.weights]
        return {each.step: EXPORTED for each in exported if not each.is_done and each.is_exported()}

    def _evaluate(self, checkpoint: WatchedCheckpoint, gives_up: bool) -> bool:
        """Attempt to evaluate a checkpoint, and return whether it has been evaluated.

        Args:
            gives_up: whether the checkpoint counts as failed if it is incomplete.

        Raises:
            Outage: storage failed and the watcher should retry later. This does not count as an attempt.
            Preempted, RequestError: see `follow`.
        """
        if self._has_receipt(checkpoint):  # another watcher has finished it since this poll began
            write_lines(self.output)
            return True
        if not checkpoint.is_exported() and not is_complete(self.run, checkpoint.step):
            if not checkpoint.is_reported_incomplete:
                checkpoint.is_reported_incomplete = True
                print(
                    f"The checkpoint at step {checkpoint.step} in {self.run.where()} is incomplete; it is skipped "
                    f"until all its files exist.",
                    flush=True,
                )
            if gives_up:
                checkpoint.attempts = MAX_ATTEMPTS
                checkpoint.failure = (
                    f"the checkpoint is incomplete: its {STATE} is damaged, or lists files that are missing. Restore "
                    f"them, or delete the checkpoint"
                )
            return False
        checkpoint.attempts += 1
        try:
            self.evaluate(checkpoint.step, checkpoint.place)
            self._record(checkpoint)
        except Preempted:
            raise
        except Outage as error:
            checkpoint.outage_began = checkpoint.outage_began or time.monotonic()
            has_lasted = time.monotonic() - checkpoint.outage_began >= MAX_OUTAGE_SECONDS
            if self.config.once or not error.is_transient or has_lasted:
                self.outage_began = None  # it may have been an outage of this checkpoint only
                return self._is_evaluated_despite(error, checkpoint)
            checkpoint.attempts -= 1
            raise
        except (RequestError, WorkError) as error:
            checkpoint.outage_began = None
            return self._is_evaluated_despite(error, checkpoint)
        return True

    def _is_evaluated_despite(self, error: Exception, checkpoint: WatchedCheckpoint) -> bool:
        """Handle the `error` of a failed evaluation, and return whether another watcher has evaluated the checkpoint.

        Raises:
            RequestError: `error` is a RequestError, and the checkpoint was not pruned in the meantime.
        """
        if self._has_receipt(checkpoint):  # another watcher finished first, and deleted the exported model in use here
            write_lines(self.output)
            return True
        step = checkpoint.step
        if step not in checkpoints_in(self.run.files("checkpoints")) and not checkpoint.is_exported():
            checkpoint.failure = None
            print(
                f"The checkpoint at step {step} in {self.run.where()} was removed while it was being read, so it is "
                f"skipped.",
                flush=True,
            )
            return False
        if isinstance(error, RequestError):
            raise error
        checkpoint.failure = str(error)
        say(error)
        return False

    def _record(self, checkpoint: WatchedCheckpoint) -> None:
        """Write evaluations.jsonl, log to the tracker, then create the receipt.

        If the watcher dies before the last of these steps, its next run repeats all three.
        """
        found = write_lines(self.output)
        if not self._has_receipt(checkpoint):
            self.log_step(checkpoint.step, [each for each in found if each.weights == self.weights])
            content = {"step": checkpoint.step, "settings": self.settings}
            create_once(open_store(checkpoint.place), self._receipt, lambda: content)

    def _finish(self, checkpoint: WatchedCheckpoint) -> None:
        """Delete an evaluated checkpoint's exported model, unless it is still needed, and mark the checkpoint as done.

        A watcher that is killed before this leaves the model behind, and its next run deletes it.
        """
        if not self.config.keep_models and not self._is_export_needed(checkpoint):
            drop_export(open_store(checkpoint.place))
        checkpoint.is_done, checkpoint.failure, self.outage_began = True, None, None

    def _is_export_needed(self, checkpoint: WatchedCheckpoint) -> bool:
        """Return whether another command may still use a checkpoint's exported model: it was exported after the
        checkpoint had been evaluated, or one of the checkpoint's sample sets is unfinished."""
        store = open_store(checkpoint.place)
        if not store.files(EXPORTED):
            return False
        files = store.listing()
        exported = [entry.modified for name, entry in files.items() if name.startswith(f"{EXPORTED}/")]
        if max(exported, default=0.0) > files[self._receipt].modified:
            return True
        return any(
            is_unfinished(below(checkpoint.place, name)) for name in filter(SET_FOLDER.fullmatch, store.entries())
        )

    @property
    def _receipt(self) -> str:
        return f"evaluated-{hashlib.sha256(canonical_json(self.settings)).hexdigest()[:12]}.json"


def read_schedule(run: Store) -> tuple[int, int]:
    """Return the interval between evaluated checkpoints and the last step, according to a run's config.yaml.

    Raises:
        RequestError: the run has no config.yaml, or it cannot be parsed.
    """
    content = run_config(run)
    return (content.get("evaluate") or {}).get("every") or 1, content["max_steps"]


def is_complete(run: Store, step: int) -> bool:
    """Return whether every file listed in a checkpoint's state.json exists. The export verifies their hashes."""
    files = checkpoints_in(run.files("checkpoints")).get(step)
    if files is None:
        return False
    folder = files[0].partition("/")[0]
    try:
        content = read_sealed(run, f"checkpoints/{folder}/{STATE}")
    except DamagedFile:
        return False
    return content is not None and {f"{folder}/{name}" for name in content["files"]} <= set(files)
