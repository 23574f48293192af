"""Leases of a run in a folder, where the kernel refuses the writes of a superseded launch.

RUN/launches/                   records and heartbeats (backend.py)
   /.unfinished/0004.<token>/   staging folder of launch 4, renamed away and removed by the next launch

A launch changes the run only by renaming files out of or into its staging folder. Its successor renames that folder
away, so the kernel refuses all later renames by the superseded launch, even if it was suspended between a check and a
rename. (A file lock would not reliably exclude launches on other machines.)
"""

import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shards.base.durable import fsync_folder, make_folder
from shards.base.store import STAGING_FOLDER, LocalStore
from train.run.lease.backend import Backend, Seen


class FolderBackend(Backend):
    """Leases of the run folder `run_dir`."""

    interval = 1.0

    def __init__(self, run_dir: Path, checkpoints: Callable[[], Mapping[str, str]] = dict):
        super().__init__(LocalStore(run_dir), checkpoints)
        self.run_dir = run_dir
        self.notes: dict[str, Any] | None = None
        """Notes of the last heartbeat."""

    def create(self, number: int, record: dict[str, Any]) -> bool:
        # the folder is created before the record, because a successor must find it; the next launch removes a folder
        # that has no record
        folder = self.staging(number, record["token"])
        make_folder(folder)
        if super().create(number, record):
            return True
        with suppress(FileNotFoundError):
            folder.rmdir()
        return False

    def beat(self, number: int, notes: dict[str, Any]) -> None:
        if notes == self.notes:
            os.utime(self.run_dir / "launches" / f"{number:04d}.sign")  # cheaper than a durable write every second
            return
        super().beat(number, notes)
        self.notes = dict(notes)

    def fence(self, number: int, token: str, seen: Seen) -> bool:
        own = self.staging(number, token)
        for folder in own.parent.iterdir():
            match = re.fullmatch(r"(\d{4,})\..+", folder.name)
            if match and int(match[1]) < number:
                with suppress(FileNotFoundError):  # this launch has been superseded as well
                    folder.rename(own / folder.name)
                # files that a suspended owner has open may remain, and are removed with this launch's folder
                shutil.rmtree(own / folder.name, ignore_errors=True)
        fsync_folder(own.parent)
        return self.is_unchanged(seen)

    def staging(self, number: int, token: str) -> Path:
        return self.run_dir / STAGING_FOLDER / f"{number:04d}.{token}"


def publish(source: Path, target: Path, staging: Path) -> None:
    """Rename `source`, in the launch's staging folder, to `target` in the run durably, replacing an existing `target`.

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
