"""Writing checkpoints in the background while training continues.

If weights are sharded, each process writes its share, either in the launch's staging folder or at the run's URL, and
passes the hashes of its files to the main process through the process group's store. The main process then completes
the checkpoint: it renames the folder into place, or uploads state.json if the run is at a URL.
"""

import json
import os
import shutil
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from shards.base.durable import fsync_file, fsync_tree, sealed_json, sha256_file, write_file
from shards.base.errors import Outage, WorkError
from train.model.tensors import HostCopies, assign_owners, bytes_of, free_memory, share_name, write_index, write_tensors
from train.run.checkpoints.checkpoint import (
    HEAD_NAME,
    LINES,
    STATE_NAME,
    VERSION,
    list_checkpoints,
    step_folder,
    step_of,
)
from train.run.checkpoints.remote import RemoteRun
from train.run.checkpoints.retention import CheckpointConfig, superfluous
from train.run.checkpoints.snapshot import Snapshot
from train.run.lease.folder import publish, remove
from train.run.lease.lease import Lease
from train.run.lease.owner import Pace
from train.run.preflight import SHUTDOWN_TIMEOUT

AGREE_SECONDS = 2.0
"""Seconds within which all processes agree to stop after a signal."""


def warn_if_slow_to_stop(pace: Pace | None, config: CheckpointConfig) -> str | None:
    """Return a warning if stopping may take longer than the time between the stop signal and SIGKILL, or None."""
    if pace is None:
        return None
    grace = min(config.grace, float(os.environ.get(SHUTDOWN_TIMEOUT, config.grace)))
    # the last checkpoint may have to wait for an earlier one that is still being written
    needed = 2 * pace.save + max(AGREE_SECONDS, pace.step)
    if needed <= grace:
        return None
    return (
        f"warning: stopping may take {needed:.0f} s, because a step takes {pace.step:.1f} s and each of up to two "
        f"checkpoints takes {pace.save:.0f} s, but the run is killed after {grace:g} s (the smaller of "
        f"checkpoint.grace and {SHUTDOWN_TIMEOUT}; with make, the latter is LEAVE). The steps since the last "
        f"checkpoint would then be lost. Request more time from the scheduler and raise checkpoint.grace and "
        f"{SHUTDOWN_TIMEOUT} (LEAVE with make), or lower checkpoint.every to lose fewer steps."
    )


Mine = Mapping[str, Collection[str]]
"""Names of the tensors that this process writes, for each file."""
Owners = Mapping[str, Mapping[str, int]]
"""Rank that writes each tensor, by file and tensor name."""


class WriterGroup(NamedTuple):
    """The processes that write a checkpoint: ranks 0 to `size` − 1, each of which writes a share."""

    rank: int = 0
    """Rank of this process."""
    size: int = 1
    store: dist.Store | None = None
    """The process group's store, over a separate connection; None: there are no other writers."""
    timeout: float = 600.0
    """Seconds that the main process waits for each share."""
    local_size: int = 1
    """Number of writers on this machine, which share its memory."""


SINGLE = WriterGroup()


class CheckpointWriter:
    """Writer that saves snapshots to a run folder, one at a time, and in the background if `asynchronous` is set.

    Every process has a writer, because gathering sharded weights takes all of them. Only the main process writes files,
    unless each process of the group writes its own shards.
    """

    def __init__(
        self,
        run_dir: Path,
        lease: Lease,
        network_json: str,
        fingerprint: dict[str, Any],
        config: CheckpointConfig,
        group: WriterGroup = SINGLE,
        remote: RemoteRun | None = None,
    ):
        """Create the writer of this process.

        Args:
            run_dir: local run folder, or a folder in it with the same layout, for snapshots of averages.
            network_json: diffusers config of the backbone.
            remote: uploads to the run's URL, if it has one.
        """
        self.lease, self.group, self.main = lease, group, group.rank == 0
        self.run_dir, self.network_json, self.config, self.remote = run_dir, network_json, config, remote
        self.content: dict[str, Any] = {
            "version": VERSION,
            "tag": config.tag or run_dir.name,
            "fingerprint": fingerprint,
        }
        if remote is not None:
            self.content |= {"launch": lease.number, "token": lease.token}
        self.shares_at_url = remote is not None and group.size > 1
        """Whether each process uploads its share from a local folder, in which case no machine has all shares."""
        self.copies = HostCopies()
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[None] | None = None
        self.seconds: float | None = None
        """Seconds that writing the last checkpoint took on the main process; None before the first checkpoint."""
        self.saved: tuple[int, float] | None = None
        """Step of the last checkpoint, and the time at which it was completed."""

    def write(self, snapshot: Snapshot) -> None:
        """Write a checkpoint, after waiting for the previous one to be written.

        With `asynchronous` and enough free memory, the tensors are copied and then written in the background.

        Raises:
            WorkError: the checkpoint could not be written.
        """
        self.finish()
        count = self.group.size
        owners = {
            file: assign_owners(tensors, count if file != HEAD_NAME else 1) for file, tensors in snapshot.files.items()
        }
        mine = {file: [name for name in names if names[name] == self.group.rank] for file, names in owners.items()}
        if self.group.rank >= count:
            for tensors in snapshot.files.values():
                write_tensors(None, tensors)
        elif self._copies_fit(snapshot, mine):
            files = {file: self.copies.take(file, tensors, mine[file]) for file, tensors in snapshot.files.items()}
            self.copies.wait()
            self.pending = self.thread.submit(self._write, replace(snapshot, files=files), mine, owners)
        else:
            with self._explain_errors():
                self._write(snapshot, mine, owners)

    def _copies_fit(self, snapshot: Snapshot, mine: Mine) -> bool:
        wanted = ({name: tensors[name] for name in mine[file]} for file, tensors in snapshot.files.items())
        needed, free = sum(map(bytes_of, wanted)) - self.copies.bytes, free_memory() // self.group.local_size
        if self.config.asynchronous and needed > free:
            print(
                f"warning: the copy for an asynchronous checkpoint needs {needed / 2**30:.1f} GiB more memory, but "
                f"only {free / 2**30:.1f} GiB is free, so training pauses while this checkpoint is written.",
                flush=True,
            )
        return self.config.asynchronous and needed <= free

    def check(self) -> None:
        """Raise the error of a background write that has failed. This does not wait for a write in progress.

        Raises:
            WorkError: the checkpoint could not be written.
        """
        if self.pending is not None and self.pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the background write has finished, if there is one.

        Raises:
            WorkError: the checkpoint could not be written.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            with self._explain_errors():
                pending.result()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WorkError(
                f"A checkpoint of {self.run_dir} could not be written: {error}. Earlier checkpoints are intact. Free "
                f"space or repair the storage, and run the same command again to resume from the newest checkpoint."
            ) from error

    def _write(self, snapshot: Snapshot, mine: Mine, owners: Owners) -> None:
        """Write a checkpoint durably, or this process's share of it. The main process then removes old checkpoints."""
        step, began = snapshot.state.step, time.monotonic()
        target = step_folder(self.run_dir, step)
        private = self._make_private(target)
        try:
            hashes = self._write_tensors(snapshot, private, mine, owners)
            content = self.content | {"state": snapshot.state.to_json()}
            if self.main:
                hashes |= self._write_configs(private, owners)
                if self.remote is not None:
                    content["lines"] = self._write_lines(snapshot.lines, private / LINES)
            if self.remote is not None and self.shares_at_url:
                self.remote.upload_share(target.relative_to(self.run_dir).as_posix(), private)
            if not self.main:
                # this must come last, because afterwards the main process may publish the folder at any time
                self._store.set(self._key(step, self.group.rank), json.dumps(hashes))
                return
            for rank in range(1, self.group.size):
                hashes |= self._wait_for(step, rank)
            self._complete(private, target, content | {"files": dict(sorted(hashes.items()))})
        finally:
            if self.main or self.shares_at_url:
                shutil.rmtree(private, ignore_errors=True)
        self.seconds, self.saved = time.monotonic() - began, (step, time.time())
        self._drop_old(step, snapshot.state.alarm.steps)

    def _make_private(self, target: Path) -> Path:
        """Create the folder into which this process writes its share of the checkpoint `target`."""
        is_shared = self.group.size > 1 and not self.shares_at_url
        private = self.lease.folder / f"{target.name}.{'parts' if is_shared else uuid.uuid4().hex[:8]}"
        private.mkdir(exist_ok=is_shared)
        return private

    @property
    def _store(self) -> dist.Store:
        assert self.group.store is not None
        return self.group.store

    def _key(self, step: int, rank: int) -> str:
        return f"shares/{self.lease.token}/{step}/{rank}"

    def _wait_for(self, step: int, rank: int) -> dict[str, str]:
        """Wait until `rank` has written its share, and return a dict from file to SHA-256.

        Raises:
            WorkError: the rank has not written it within `timeout` seconds.
        """
        try:
            self._store.wait([self._key(step, rank)], timedelta(seconds=self.group.timeout))
        except RuntimeError as error:  # a timeout or an unreachable store
            raise WorkError(
                f"A checkpoint of {self.run_dir} is incomplete: process {rank} did not write its share within "
                f"{self.group.timeout:g} s (collective_timeout). Earlier checkpoints are intact. Check that all "
                f"machines share run_dir or can reach its URL, and run the command again to resume from the newest "
                f"checkpoint."
            ) from error
        hashes: dict[str, str] = json.loads(self._store.get(self._key(step, rank)))
        self._store.delete_key(self._key(step, rank))
        return hashes

    def _complete(self, private: Path, target: Path, content: dict[str, Any]) -> None:
        """Complete the checkpoint durably once all shares exist. `content`: content of its state.json."""
        if self.remote is not None and self.shares_at_url:
            self.remote.complete(target.relative_to(self.run_dir).as_posix(), sealed_json(content))
            return
        write_file(private / STATE_NAME, sealed_json(content))
        fsync_tree(private)
        target.parent.mkdir(parents=True, exist_ok=True)
        publish(private, target, self.lease.folder)  # replaces a damaged checkpoint, or an earlier save of this step
        if self.remote is not None:
            self.remote.upload(target)

    def upload_again(self, folder: Path) -> None:
        """Upload an earlier launch's checkpoint in the background."""
        assert self.remote is not None
        self.pending = self.thread.submit(self.remote.upload, folder)

    def _write_tensors(self, snapshot: Snapshot, folder: Path, mine: Mine, owners: Owners) -> dict[str, str]:
        """Write this process's share of each file, and return a dict from file to SHA-256."""
        hashes = {}
        for name, tensors in snapshot.files.items():
            path = self._share(folder / name, owners[name], self.group.rank)
            path.parent.mkdir(exist_ok=True)
            if not mine[name] and not (self.main and path.name == Path(name).name):
                write_tensors(None, tensors)
                continue
            hashes[path.relative_to(folder).as_posix()] = write_tensors(path, tensors, mine[name])
            fsync_file(path)  # each machine can sync only its own writes
        return hashes

    def _write_configs(self, folder: Path, owners: Owners) -> dict[str, str]:
        """Write the configs that `from_pretrained` needs and the indexes of sharded files.

        Returns:
            File → SHA-256.
        """
        written = []
        for name, names in owners.items():
            path = folder / name
            if path.parent != folder:
                written.append(path.with_name("config.json"))
                written[-1].write_text(self.network_json)
            shares = {key: self._share(path, names, rank).name for key, rank in names.items()}
            if set(shares.values()) - {path.name}:
                written.append(write_index(path, shares))
        return {path.relative_to(folder).as_posix(): sha256_file(path) for path in written}

    def _share(self, path: Path, names: Mapping[str, int], rank: int) -> Path:
        """Return the path of the file that `rank` writes: a shard, or `path` itself if rank 0 writes all tensors."""
        return share_name(path, rank, self.group.size) if max(names.values(), default=0) > 0 else path

    def _write_lines(self, lines: Mapping[str, int], folder: Path) -> dict[str, str]:
        """Copy the logs up to the snapshot's step, so that a machine without the run folder can continue them.

        Returns:
            File → SHA-256.
        """
        folder.mkdir()
        for name, size in lines.items():
            shutil.copyfile(self.run_dir / name, folder / name)
            if (folder / name).stat().st_size > size:  # lines of later steps have been appended
                os.truncate(folder / name, size)
        return {f"{folder.name}/{name}": sha256_file(folder / name) for name in sorted(lines)}

    def _drop_old(self, step: int, alarms: Iterable[int]) -> None:
        if self.remote is not None and self.run_dir == self.lease.run_dir:  # not for snapshots of averages
            try:
                self.remote.drop_old(step, lambda ages: superfluous(ages, self.config, alarms))
            except Outage as error:  # the next checkpoint removes them
                print(f"Old checkpoints could not be removed; the next save will try again: {error}", flush=True)
        # damaged checkpoints of later steps, which this launch skipped when resuming, do not count as the newest
        whole = {step_of(folder): folder for folder in list_checkpoints(self.run_dir) if step_of(folder) <= step}
        ages = {step: time.time() - folder.stat().st_mtime for step, folder in whole.items()}
        # for a run at a URL, this machine keeps only the newest checkpoint
        old = superfluous(ages, self.config, alarms) if self.remote is None else sorted(whole.keys() - {step})
        for each in old:
            try:
                remove(whole[each], self.lease.folder)
            except FileNotFoundError:  # the launch was superseded
                raise
            except OSError as error:  # for example, it was restored from a backup by another user
                print(f"{whole[each]} could not be removed completely: {error}", flush=True)
