"""Leases in a run folder, where a superseded launch is fenced off by the kernel.

launches/0004/              staging folder of the newest launch, removed by the next one
             /launch.json   its record; the modification time is its heartbeat
launches/0003.json          record of an earlier launch

A launch changes the run only by renames from and into its staging folder. A successor renames that folder away, so the
kernel refuses all later renames of the superseded launch, even if it was suspended between a check and a rename. (A
file lock would say nothing about other machines.)
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shards.base.durable import fsync_folder, make_folder, write_file
from train.run.lease.lease import Heartbeat, Seen

RECORD = "launch.json"


class FolderBackend:
    """Leases of the run folder `run_dir`."""

    interval = 1.0

    def __init__(self, run_dir: Path, checkpoints: Callable[[], Mapping[str, str]] = dict):
        """`checkpoints`: returns the name → identity of the checkpoints that readers see."""
        self.run_dir, self.place, self.checkpoints = run_dir, str(run_dir), checkpoints

    def newest(self) -> Heartbeat:
        numbers = (int(path.name) for path in (self.run_dir / "launches").glob("[0-9]*") if path.is_dir())
        number = max(numbers, default=0)
        try:
            return Heartbeat(number, str((self.staging(number) / RECORD).stat().st_mtime_ns))
        except FileNotFoundError:
            return Heartbeat(number)

    def read(self, number: int) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads((self.staging(number) / RECORD).read_bytes())
        except FileNotFoundError:
            return {}
        return record

    def create(self, number: int, record: dict[str, Any]) -> bool:
        make_folder(self.run_dir / "launches")
        folder = self.staging(number)
        try:
            folder.mkdir()
            if self.newest().number != number:  # a superseded launch had this number: its folder was renamed away
                folder.rmdir()
                return False
            self._write(folder, record)
        except (FileExistsError, FileNotFoundError):  # a different launch has the number, or took over already
            return False
        return True

    def beat(self, number: int, notes: dict[str, Any]) -> None:
        record = self.read(number)
        if record | notes == record:
            os.utime(self.staging(number) / RECORD)
        else:
            self._write(self.staging(number), record | notes)

    def fence(self, number: int, seen: Seen) -> bool:
        folder = self.staging(number)
        for older in folder.parent.glob("[0-9]*"):
            if older.is_dir() and int(older.name) < number:
                with suppress(FileNotFoundError):  # this launch was superseded as well
                    older.rename(folder / older.name)
                with suppress(FileNotFoundError):  # it was killed before it wrote its record
                    (folder / older.name / RECORD).rename(older.with_suffix(".json"))
                # what a suspended owner holds open may remain, and is removed with this folder
                shutil.rmtree(folder / older.name, ignore_errors=True)
        fsync_folder(folder.parent)
        return seen.checkpoints in (None, self.checkpoints())

    def staging(self, number: int, token: str = "") -> Path:
        return self.run_dir / "launches" / f"{number:04d}"

    def _write(self, folder: Path, record: dict[str, Any]) -> None:
        """Write a record atomically. The folder is never created here, because a successor may have removed it."""
        write_file(folder / f".{RECORD}", json.dumps(record, indent=2).encode()).replace(folder / RECORD)


def publish(source: Path, target: Path, staging: Path) -> None:
    """Rename `source`, which is in the launch's staging folder, to `target` in the run, durably, replacing it.

    Raises:
        FileNotFoundError: the launch was superseded.
    """
    remove(target, staging)
    source.replace(target)
    fsync_folder(target.parent)


def remove(path: Path, staging: Path) -> None:
    """Remove a folder of the run atomically, if it exists.

    Raises:
        FileNotFoundError: the launch was superseded.
    """
    if path.is_dir():
        gone = staging / f"{path.name}.{uuid.uuid4().hex[:8]}"
        path.replace(gone)
        shutil.rmtree(gone)
