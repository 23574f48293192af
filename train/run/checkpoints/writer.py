"""The writer that makes checkpoints of a run's snapshots while training goes on."""

import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from shards.base.durable import fsync_file, sha256_file
from shards.base.errors import Outage, WorkError
from train.model.tensors import HostCopies, bytes_of, free_memory, owners, share_name, write_index, write_tensors
from train.run.checkpoints.checkpoint import HEAD_NAME, LINES, VERSION, list_checkpoints, step_folder, step_of
from train.run.checkpoints.config import CheckpointConfig
from train.run.checkpoints.remote import RemoteRun
from train.run.checkpoints.retention import superfluous
from train.run.checkpoints.shares import ALONE, Writers, meeting
from train.run.checkpoints.snapshot import Snapshot
from train.run.launches import Pace, remove

AGREED_SECONDS = 2.0
"""Within which the processes agree to leave."""


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


Mine = Mapping[str, Collection[str]]
Owned = Mapping[str, Mapping[str, int]]


class CheckpointWriter:
    """Writes snapshots into a run folder, one at a time; while training goes on, where `asynchronous`.

    Every process has one, as shares of weights are gathered. The main one's writes; the others', too, where weights are
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
        away: RemoteRun | None = None,
    ):
        """`folder`: the launch's own; `unet_json`: the diffusers config of the U-Net; `away`: the run's address."""
        self.folder, self.writers, self.main = folder, writers, writers.rank == 0
        self.run_dir, self.unet_json, self.config, self.away = run_dir, unet_json, config, away
        self.content: dict[str, Any] = {
            "version": VERSION,
            "tag": config.tag or run_dir.name,
            "fingerprint": fingerprint,
        }
        if away is not None:
            self.content |= {"launch": away.number, "token": away.token}
        self.meeting = meeting(run_dir, folder, writers, away)
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
        """Write a checkpoint durably, or this process's share of it; then drop the older ones that are not to be kept.

        Args:
            mine: file → names of the tensors that this process writes.
            owned: file → name → who does.
        """
        step, began = snapshot.state.step, time.monotonic()
        target = step_folder(self.run_dir, step)
        private = self.meeting.private(target)
        try:
            hashes = self._write_tensors(snapshot, private, mine, owned)
            content = self.content | {"state": snapshot.state.to_json()}
            if self.main:
                hashes |= self._write_configs(private, owned)
                if self.away is not None:
                    content["lines"] = self._write_lines(snapshot.lines, private / LINES)
            self.meeting.hand_in(private, target, hashes)
            if not self.main:
                return
            for rank in range(1, self.writers.total):
                hashes |= self.meeting.wait_for(private, target, rank)
            self.meeting.publish(private, target, content | {"files": dict(sorted(hashes.items()))})
        finally:
            if self.main or self.away is not None:
                shutil.rmtree(private, ignore_errors=True)
        self.seconds, self.saved = time.monotonic() - began, (step, time.time())
        self._drop_old(step, snapshot.state.alarm.steps)

    def put_again(self, folder: Path) -> None:
        """Have a checkpoint of an earlier launch put at the address, in the background."""
        assert self.away is not None
        self.pending = self.thread.submit(self.away.put, folder, self.run_dir)

    def _write_tensors(self, snapshot: Snapshot, folder: Path, mine: Mine, owned: Owned) -> dict[str, str]:
        """This process's share of each file; returns file → SHA-256."""
        hashes = {}
        for name, tensors in snapshot.files.items():
            path = self._share(folder / name, owned[name], self.writers.rank)
            path.parent.mkdir(exist_ok=True)
            if not mine[name] and not (self.main and path.name == Path(name).name):
                write_tensors(None, tensors)
                continue
            hashes[path.relative_to(folder).as_posix()] = write_tensors(path, tensors, mine[name])
            fsync_file(path)  # by the machine that wrote it
        return hashes

    def _write_configs(self, folder: Path, owned: Owned) -> dict[str, str]:
        """The networks' configs, in the layout that `Any.from_pretrained` loads, and indexes of shares; as above."""
        written = []
        for name, names in owned.items():
            path = folder / name
            if path.parent != folder:
                written.append(path.with_name("config.json"))
                written[-1].write_text(self.unet_json)
            shares = {key: self._share(path, names, rank).name for key, rank in names.items()}
            if set(shares.values()) - {path.name}:
                written.append(write_index(path, shares))
        return {path.relative_to(folder).as_posix(): sha256_file(path) for path in written}

    def _share(self, path: Path, names: Mapping[str, int], rank: int) -> Path:
        """The file of a process; the whole one where one process writes all of it."""
        return share_name(path, rank, self.writers.total) if max(names.values(), default=0) > 0 else path

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
