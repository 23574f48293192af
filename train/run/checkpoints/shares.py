"""How processes that each write a share of a checkpoint come together: in a run folder, or at the run's address.

A process that is done leaves a receipt, the hashes of its files. The main one waits for all receipts, and then makes a
checkpoint of the shares by one rename, or, at an address, by the state.json that comes last.
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
from train.run.launches import publish


class Writers(NamedTuple):
    """Which processes write a checkpoint: the first `total` of them, each a share."""

    rank: int = 0
    """This process's."""
    total: int = 1
    patience: float = 600.0
    """Seconds that the main one waits for the shares of the others."""
    beside: int = 1
    """How many write on this machine, and share its memory."""


ALONE = Writers()


class Meeting(ABC):
    """Where the processes' shares come together."""

    pause: float
    """Seconds between looks for a receipt."""

    def __init__(self, run_dir: Path, writers: Writers, away: RemoteRun | None):
        self.run_dir, self.writers, self.away = run_dir, writers, away

    @abstractmethod
    def private(self, target: Path) -> Path:
        """A folder for what this process writes of the checkpoint `target`."""

    @abstractmethod
    def hand_in(self, private: Path, target: Path, hashes: dict[str, str]) -> None:
        """Bring this process's share where it belongs; then tell the main one."""

    @abstractmethod
    def receipt(self, private: Path, target: Path, rank: int) -> bytes | None:
        """What another process told; None: nothing yet."""

    @abstractmethod
    def publish(self, private: Path, target: Path, content: dict[str, Any]) -> None:
        """All shares are there: make a checkpoint of them, durably. `content`: of its state.json."""

    def wait_for(self, private: Path, target: Path, rank: int) -> dict[str, str]:
        """File → SHA-256, of what another process wrote.

        Raises:
            WorkError: it has not told in `patience` seconds.
        """
        deadline = time.monotonic() + self.writers.patience
        while not (found := self.receipt(private, target, rank)):
            if time.monotonic() > deadline:
                raise WorkError(
                    f"A checkpoint of {self.run_dir} is not complete: process {rank} has not written its share of it "
                    f"in {self.writers.patience:g} s (collective_timeout). The ones before it are whole. See that all "
                    f"machines share run_dir, or reach its address; the same command again resumes from the newest."
                )
            time.sleep(self.pause)
        hashes: dict[str, str] = json.loads(found)
        return hashes


class InFolder(Meeting):
    """In the launch's own folder of the run folder, which all processes share that write."""

    pause = 0.05

    def __init__(self, run_dir: Path, folder: Path, writers: Writers, away: RemoteRun | None):
        super().__init__(run_dir, writers, away)
        self.folder = folder

    def private(self, target: Path) -> Path:
        together = self.writers.total > 1
        private = self.folder / f"{target.name}.{'parts' if together else uuid.uuid4().hex[:8]}"
        private.mkdir(exist_ok=together)
        return private

    def hand_in(self, private: Path, target: Path, hashes: dict[str, str]) -> None:
        if self.writers.rank == 0:
            return
        name = f"part-{self.writers.rank:05d}.json"
        # and nothing after the rename: the main process may give the folder its name from then on
        write_file(private / f".{name}", json.dumps(hashes).encode()).replace(private / name)

    def receipt(self, private: Path, target: Path, rank: int) -> bytes | None:
        path = private / f"part-{rank:05d}.json"
        if not path.is_file():
            return None
        found = path.read_bytes()
        path.unlink()
        return found

    def publish(self, private: Path, target: Path, content: dict[str, Any]) -> None:
        write_file(private / STATE_NAME, sealed_json(content))
        fsync_tree(private)
        target.parent.mkdir(parents=True, exist_ok=True)
        publish(private, target, self.folder)  # in place of a damaged one, or of this step saved before
        if self.away is not None:
            self.away.put(target, self.folder.parents[1])


class AtAddress(Meeting):
    """At the run's address: each process puts its share there, from a folder of its machine. No machine has all."""

    pause = 0.5
    away: RemoteRun

    def private(self, target: Path) -> Path:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))

    def hand_in(self, private: Path, target: Path, hashes: dict[str, str]) -> None:
        self.away.put_share(target.name, private, self._receipt_name(self.writers.rank), hashes)

    def receipt(self, private: Path, target: Path, rank: int) -> bytes | None:
        try:
            return self.away.read_share(target.name, self._receipt_name(rank))
        except (FileNotFoundError, Outage):  # or it is out of reach just now
            return None

    def publish(self, private: Path, target: Path, content: dict[str, Any]) -> None:
        files = [*content["files"], *content["lines"]]
        self.away.complete(target.name, files, sealed_json(content), self.run_dir)

    def _receipt_name(self, rank: int) -> str:
        return f"part-{rank:05d}-{self.away.token}.json"  # one of an earlier launch says nothing of this one's share


def meeting(run_dir: Path, folder: Path, writers: Writers, away: RemoteRun | None) -> Meeting:
    """Where the shares of a run's checkpoints come together. `folder`: the launch's own."""
    if away is not None and writers.total > 1:
        return AtAddress(run_dir, writers, away)
    return InFolder(run_dir, folder, writers, away)
