"""Checkpoints that several processes write in shares, in the run folder or at the run's URL.

A process that has written its share adds a receipt with the hashes of its files. The main process waits for all
receipts and then completes the checkpoint: in a folder by one rename, at a URL by uploading state.json last.
"""

import json
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

from shards.base.durable import fsync_tree, sealed_json, write_file
from shards.base.errors import Outage, WorkError
from train.run.checkpoints.checkpoint import STATE_NAME
from train.run.checkpoints.remote import RemoteRun
from train.run.lease.folder import publish


class WriterGroup(NamedTuple):
    """The processes that write a checkpoint: ranks 0 to `size` − 1, each of which writes a share."""

    rank: int = 0
    """Rank of this process."""
    size: int = 1
    timeout: float = 600.0
    """Seconds that the main process waits for a receipt."""
    local_size: int = 1
    """Number of writers on this machine, which share its memory."""


SINGLE = WriterGroup()


class ShareExchange(ABC):
    """How the main process collects the shares of the other processes, and completes the checkpoint."""

    poll_seconds: float
    """Seconds between checks for a receipt."""

    def __init__(self, run_dir: Path, group: WriterGroup, remote: RemoteRun | None):
        self.run_dir, self.group, self.remote = run_dir, group, remote

    @abstractmethod
    def private(self, target: Path) -> Path:
        """Create the folder for this process's share of the checkpoint `target`."""

    @abstractmethod
    def hand_in(self, private: Path, target: Path, hashes: dict[str, str]) -> None:
        """Store this process's share, and then its receipt."""

    @abstractmethod
    def read_receipt(self, private: Path, target: Path, rank: int) -> bytes | None:
        """Read the receipt of `rank`; None: it does not exist yet."""

    @abstractmethod
    def complete(self, private: Path, target: Path, content: dict[str, Any]) -> None:
        """Durably complete the checkpoint once all shares exist. `content`: content of its state.json."""

    def wait_for(self, private: Path, target: Path, rank: int) -> dict[str, str]:
        """Wait for the receipt of `rank`, and return the file → SHA-256 of its share.

        Raises:
            WorkError: the receipt did not appear within `timeout` seconds.
        """
        deadline = time.monotonic() + self.group.timeout
        while not (found := self.read_receipt(private, target, rank)):
            if time.monotonic() > deadline:
                raise WorkError(
                    f"A checkpoint of {self.run_dir} is incomplete: process {rank} has not written its share within "
                    f"{self.group.timeout:g} s (collective_timeout). Earlier checkpoints are intact. Check that all "
                    f"machines share run_dir or can reach its URL, and run the command again to resume from the newest."
                )
            time.sleep(self.poll_seconds)
        hashes: dict[str, str] = json.loads(found)
        return hashes


class FolderExchange(ShareExchange):
    """Exchange in the launch's staging folder, which all writers share."""

    poll_seconds = 0.05

    def __init__(self, run_dir: Path, staging: Path, group: WriterGroup, remote: RemoteRun | None):
        super().__init__(run_dir, group, remote)
        self.staging = staging

    def private(self, target: Path) -> Path:
        is_shared = self.group.size > 1
        private = self.staging / f"{target.name}.{'parts' if is_shared else uuid.uuid4().hex[:8]}"
        private.mkdir(exist_ok=is_shared)
        return private

    def hand_in(self, private: Path, target: Path, hashes: dict[str, str]) -> None:
        if self.group.rank == 0:
            return
        name = f"part-{self.group.rank:05d}.json"
        # nothing may follow this rename, because the main process may publish the folder from then on
        write_file(private / f".{name}", json.dumps(hashes).encode()).replace(private / name)

    def read_receipt(self, private: Path, target: Path, rank: int) -> bytes | None:
        path = private / f"part-{rank:05d}.json"
        if not path.is_file():
            return None
        found = path.read_bytes()
        path.unlink()
        return found

    def complete(self, private: Path, target: Path, content: dict[str, Any]) -> None:
        write_file(private / STATE_NAME, sealed_json(content))
        fsync_tree(private)
        target.parent.mkdir(parents=True, exist_ok=True)
        publish(private, target, self.staging)  # replaces a damaged checkpoint, or an earlier save of this step
        if self.remote is not None:
            self.remote.upload(target)


class UrlExchange(ShareExchange):
    """Exchange at the run's URL: each process uploads its share from a local folder, and no machine has all of them."""

    poll_seconds = 0.5
    remote: RemoteRun

    def private(self, target: Path) -> Path:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))

    def hand_in(self, private: Path, target: Path, hashes: dict[str, str]) -> None:
        self.remote.upload_share(target.name, private, self._receipt_name(self.group.rank), hashes)

    def read_receipt(self, private: Path, target: Path, rank: int) -> bytes | None:
        try:
            return self.remote.read_receipt(target.name, self._receipt_name(rank))
        except (FileNotFoundError, Outage):
            return None

    def complete(self, private: Path, target: Path, content: dict[str, Any]) -> None:
        files = [*content["files"], *content["lines"]]
        self.remote.complete(target.name, files, sealed_json(content))

    def _receipt_name(self, rank: int) -> str:
        return f"part-{rank:05d}-{self.remote.lease.token}.json"  # an earlier launch's receipt must not count


def make_exchange(run_dir: Path, staging: Path, group: WriterGroup, remote: RemoteRun | None) -> ShareExchange:
    """Build the exchange for the shares of a run's checkpoints. `staging`: the launch's staging folder."""
    if remote is not None and group.size > 1:
        return UrlExchange(run_dir, group, remote)
    return FolderExchange(run_dir, staging, group, remote)
