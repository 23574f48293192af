"""Snapshots of a run, and the writer that makes checkpoints of them while training goes on."""

import json
import os
import shutil
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from shards.base.durable import fsync_file, fsync_tree, sha256_file, write_file, write_sealed_json
from shards.base.errors import Outage, WorkError
from train.model.ema import Ema
from train.model.tensors import HostCopies, bytes_of, free_memory, owners, part_name, write_index, write_tensors
from train.run.launches import Pace, publish, remove
from train.run.saving.away import Away
from train.run.saving.checkpoint import (
    HEAD_NAME,
    LINES,
    OPTIMIZER_NAME,
    STATE_NAME,
    WEIGHTS_NAME,
    flatten,
    list_checkpoints,
    step_folder,
    step_of,
    trained,
)
from train.run.saving.keep import KeepConfig, superfluous
from train.run.state import TrainState

AGREED_SECONDS = 2.0
"""Within which the processes agree to leave."""


class CheckpointConfig(KeepConfig):
    """When the run is saved."""

    every: int = Field(1000, ge=1)
    """Steps; the last step is always saved."""
    asynchronous: bool = True
    """Copy what is to be saved to the CPU's memory, and write it while training goes on; one at a time."""
    grace: float = Field(120.0, gt=0)
    """Seconds from the signal to leave to the kill, as the scheduler has it: a run that saves more slowly is warned."""
    tag: str | None = None
    """The phase's name, in the checkpoint and in messages; null: the run folder's name."""


def too_slow_to_leave(pace: Pace | None, config: CheckpointConfig) -> str | None:
    """What to tell of a run of this pace, where a step and a save may not fit between the signal and the kill."""
    if pace is None:
        return None
    grace = min(config.grace, float(os.environ.get("PET_SHUTDOWN_TIMEOUT", config.grace)))
    # one may be under way, which the last one waits for
    needed = 2 * pace.save + max(AGREED_SECONDS, pace.step)
    if needed <= grace:
        return None
    return (
        f"warning: to leave may take {needed:.0f} s, as a step takes {pace.step:.1f} s and a checkpoint is written in "
        f"{pace.save:.0f} s, maybe behind another one, but {grace:g} s pass before the kill (the lesser of "
        f"checkpoint.grace and the launcher's LEAVE). What was done since the last checkpoint would be lost. Ask the "
        f"scheduler for more time and raise both, or lower checkpoint.every."
    )


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds: the run's own tensors, or copies of them, beside which the run may go on."""

    state: TrainState
    files: dict[str, dict[str, Tensor]]
    """File below the checkpoint's folder → its tensors, by name."""

    lines: Mapping[str, int] = field(default_factory=dict)
    """Logs of the run folder → their bytes up to this step."""


def take_snapshot(
    state: TrainState,
    unet: Any,
    optimizer: Optimizer,
    averages: dict[str, Ema],
    head: nn.Module | None = None,
    lines: Mapping[str, int] | None = None,
) -> Snapshot:
    """The run as it stands; nothing is copied yet. `head`: the projection head, where a layer is aligned."""
    files = {f"unet/{WEIGHTS_NAME}": unet.state_dict(), OPTIMIZER_NAME: flatten(trained(unet, head), optimizer)}
    if head is not None:
        files[HEAD_NAME] = head.state_dict()
    return Snapshot(state.copy(), files | average_files(unet, averages), lines or {})


def average_files(
    unet: Any, averages: dict[str, Ema], dtype: torch.dtype = torch.float32
) -> dict[str, dict[str, Tensor]]:
    """File → tensors, of those averages that are held, as `dtype`; and buffers, which are not averaged, as they are."""
    files = {}
    for folder, ema in averages.items():
        if ema.average is not None:
            average = {name: value.to(dtype) for name, value in ema.average.items()}
            files[f"{folder}/{WEIGHTS_NAME}"] = unet.state_dict() | average
    return files


Mine = Mapping[str, Collection[str]]
Owned = Mapping[str, Mapping[str, int]]


class Writers(NamedTuple):
    """Which processes write a checkpoint: the first `total` of them, each a part."""

    rank: int = 0
    """This process's."""
    total: int = 1
    patience: float = 600.0
    """Seconds that the main one waits for the parts of the others."""
    beside: int = 1
    """How many write on this machine, and share its memory."""


ALONE = Writers()


def receipt_name(rank: int) -> str:
    """What says that the part of `rank` is on the disk."""
    return f"part-{rank:05d}.json"


class CheckpointWriter:
    """Writes snapshots into a run folder, one at a time; while training goes on, where `asynchronous`.

    Every process has one, as parts of weights are gathered. The main one's writes; the others', too, where weights are
    split and so is the writing.
    """

    def __init__(
        self,
        run_dir: Path,
        folder: Path,
        unet_json: str,
        fingerprint: dict[str, Any],
        config: CheckpointConfig,
        writers: Writers = ALONE,
        away: Away | None = None,
    ):
        """`folder`: the launch's own; `unet_json`: the diffusers config of the U-Net; `away`: the run's address."""
        self.folder, self.writers, self.main = folder, writers, writers.rank == 0
        self.run_dir, self.unet_json, self.config, self.away = run_dir, unet_json, config, away
        self.content: dict[str, Any] = {"tag": config.tag or run_dir.name, "fingerprint": fingerprint}
        if away is not None:
            self.content["launch"] = away.number
        self.copies = HostCopies()
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[None] | None = None
        self.seconds: float | None = None
        """That the last checkpoint took to write; of the main process, and None before the first."""
        self.saved: tuple[int, float] | None = None
        """Its step, and when it was there."""

    def write(self, snapshot: Snapshot) -> None:
        """Copy, and begin to write once the one before is done; or write at once, tensor by tensor.

        Raises:
            WorkError: the checkpoint could not be written.
        """
        self.finish()
        count = self.writers.total
        owned = {file: owners(tensors, count if file != HEAD_NAME else 1) for file, tensors in snapshot.files.items()}
        mine = {file: [name for name in names if names[name] == self.writers.rank] for file, names in owned.items()}
        if self.writers.rank >= count:
            for tensors in snapshot.files.values():
                write_tensors(None, tensors)
        elif self._copies_fit(snapshot, mine):
            files = {file: self.copies.take(file, tensors, mine[file]) for file, tensors in snapshot.files.items()}
            self.copies.wait()
            self.pending = self.thread.submit(self._write, replace(snapshot, files=files), mine, owned)
        else:
            with self._explained():
                self._write(snapshot, mine, owned)

    def _copies_fit(self, snapshot: Snapshot, mine: Mine) -> bool:
        wanted = ({name: tensors[name] for name in mine[file]} for file, tensors in snapshot.files.items())
        needed, free = sum(map(bytes_of, wanted)) - self.copies.bytes, free_memory() // self.writers.beside
        if self.config.asynchronous and needed > free:
            print(
                f"warning: a copy of the run would take {needed / 2**30:.1f} GiB more of this machine's memory, of "
                f"which {free / 2**30:.1f} GiB are free: training waits while this checkpoint is written.",
                flush=True,
            )
        return self.config.asynchronous and needed <= free

    def check(self) -> None:
        """Raise what went wrong with a checkpoint written in the background, once it is known; waits for nothing.

        Raises:
            WorkError: the checkpoint could not be written.
        """
        if self.pending is not None and self.pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait until nothing is being written.

        Raises:
            WorkError: the checkpoint could not be written.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            with self._explained():
                pending.result()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WorkError(
                f"A checkpoint of {self.run_dir} could not be written: {error}. The ones before it are whole. Make "
                f"room or mend the storage; the same command again resumes from the newest."
            ) from error

    def _write(self, snapshot: Snapshot, mine: Mine, owned: Owned) -> None:
        """Write a checkpoint durably, or this process's part of it; then drop the older ones that are not to be kept.

        Args:
            mine: file → names of the tensors that this process writes.
            owned: file → name → who does.
        """
        step, began = snapshot.state.step, time.monotonic()
        target = step_folder(self.run_dir, step)
        private = self.folder / f"{target.name}.{'parts' if self.writers.total > 1 else uuid.uuid4().hex[:8]}"
        private.mkdir(exist_ok=self.writers.total > 1)
        try:
            hashes = self._write_tensors(snapshot, private, mine, owned)
            if not self.main:
                name = receipt_name(self.writers.rank)
                # and nothing after the rename: the main process may give the folder its name from then on
                write_file(private / f".{name}", json.dumps(hashes).encode()).replace(private / name)
                return
            for rank in range(1, self.writers.total):
                hashes |= self._await_part(private / receipt_name(rank), rank)
            hashes |= self._write_configs(private, owned)
            content = self.content | {"state": snapshot.state.to_json(), "files": dict(sorted(hashes.items()))}
            if self.away is not None:
                content["lines"] = self._write_lines(snapshot.lines, private / LINES)
            write_sealed_json(private / STATE_NAME, content)
            fsync_tree(private)
            target.parent.mkdir(parents=True, exist_ok=True)
            publish(private, target, self.folder)  # in place of a damaged one, or of this step saved before
        finally:
            if self.main:
                shutil.rmtree(private, ignore_errors=True)
        if self.away is not None:
            self.away.put(target, self.folder.parents[1])
        self.seconds, self.saved = time.monotonic() - began, (step, time.time())
        self._drop_old(step, snapshot.state.alarm.steps)

    def _write_tensors(self, snapshot: Snapshot, folder: Path, mine: Mine, owned: Owned) -> dict[str, str]:
        """This process's part of each file; returns file → SHA-256."""
        hashes = {}
        for name, tensors in snapshot.files.items():
            path = self._part(folder / name, owned[name], self.writers.rank)
            path.parent.mkdir(exist_ok=True)
            if not mine[name] and not (self.main and path.name == Path(name).name):
                write_tensors(None, tensors)
                continue
            hashes[path.relative_to(folder).as_posix()] = write_tensors(path, tensors, mine[name])
            fsync_file(path)  # by the machine that wrote it
        return hashes

    def _write_configs(self, folder: Path, owned: Owned) -> dict[str, str]:
        """The networks' configs, in the layout that `Any.from_pretrained` loads, and indexes of parts; as above."""
        written = []
        for name, names in owned.items():
            path = folder / name
            if path.parent != folder:
                written.append(path.with_name("config.json"))
                written[-1].write_text(self.unet_json)
            parts = {key: self._part(path, names, rank).name for key, rank in names.items()}
            if set(parts.values()) - {path.name}:
                written.append(write_index(path, parts))
        return {path.relative_to(folder).as_posix(): sha256_file(path) for path in written}

    def _part(self, path: Path, names: Mapping[str, int], rank: int) -> Path:
        """The file of a process; the whole one where one process writes all of it."""
        return part_name(path, rank, self.writers.total) if max(names.values(), default=0) > 0 else path

    def _await_part(self, receipt: Path, rank: int) -> dict[str, str]:
        deadline = time.monotonic() + self.writers.patience
        while not receipt.is_file():
            if time.monotonic() > deadline:
                raise WorkError(
                    f"A checkpoint of {self.run_dir} is not complete: process {rank} has not written its part of it in "
                    f"{self.writers.patience:g} s (collective_timeout). The ones before it are whole. See that all "
                    f"machines share run_dir; the same command again resumes from the newest."
                )
            time.sleep(0.05)
        hashes: dict[str, str] = json.loads(receipt.read_bytes())
        receipt.unlink()
        return hashes

    def _write_lines(self, lines: Mapping[str, int], folder: Path) -> dict[str, str]:
        """Copies of the logs up to the snapshot's step, as an empty machine needs them to go on; returns hashes."""
        folder.mkdir()
        for name, size in lines.items():
            with (self.run_dir / name).open("rb") as file:
                (folder / name).write_bytes(file.read(size))
        return {f"{folder.name}/{name}": sha256_file(folder / name) for name in sorted(lines)}

    def _drop_old(self, step: int, alarms: Iterable[int]) -> None:
        if self.away is not None and self.run_dir == self.folder.parents[1]:  # and not its SNAPSHOTS
            try:
                self.away.drop_old(step, lambda ages: superfluous(ages, self.config, alarms))
            except Outage as error:  # the next one removes them
                print(f"older checkpoints stay for now: {error}", flush=True)
        # damaged ones of later steps, which this run passed over, do not count among the newest
        whole = {step_of(folder): folder for folder in list_checkpoints(self.run_dir) if step_of(folder) <= step}
        ages = {step: time.time() - folder.stat().st_mtime for step, folder in whole.items()}
        # of a run at an address this machine keeps the newest alone
        old = superfluous(ages, self.config, alarms) if self.away is None else sorted(whole.keys() - {step})
        for each in old:
            remove(whole[each], self.folder)
