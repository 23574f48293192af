"""Leases with one mistake each, which the state machines must find."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from shards.base.durable import canonical_json
from tests.train.run.lease.machines import FolderMachine, StoreMachine
from train.run.checkpoints.checkpoint import STATE_NAME
from train.run.checkpoints.remote import RemoteRun, files_below
from train.run.lease.folder import FolderBackend
from train.run.lease.lease import Seen
from train.run.lease.store import StoreBackend


class Overwriting(StoreBackend):
    """Writes a launch's record even if the number is taken."""

    def create(self, number: int, record: dict[str, Any]) -> bool:
        self.store.write(f"launches/{number:04d}.json", canonical_json(record))
        return True


class Forgetful(StoreBackend):
    """Does not recognise its own record, so a winner whose reply was lost takes the run over from itself."""

    def read(self, number: int) -> dict[str, Any]:
        return super().read(number) | {"token": None}


class Trusting(StoreBackend):
    """Accepts the checkpoints that it finds, even if they changed since the launch chose the one to resume from."""

    def fence(self, number: int, seen: Seen) -> bool:
        return super().fence(number, seen._replace(checkpoints=None))


class Early(StoreBackend):
    """Looks at the checkpoints before it creates its record instead of after."""

    found: dict[str, str]

    def create(self, number: int, record: dict[str, Any]) -> bool:
        self.found = dict(self.checkpoints(self.store))
        return super().create(number, record)

    def fence(self, number: int, seen: Seen) -> bool:
        if self.found != seen.checkpoints:
            return False
        self.store.write(f"launches/{number:04d}.accepted.json", canonical_json(self.found))
        return True


class Fenceless(StoreBackend):
    """Never says which checkpoints it accepts."""

    def fence(self, number: int, seen: Seen) -> bool:
        return seen.checkpoints in (None, dict(self.checkpoints(self.store)))


class Dropping(StoreBackend):
    """Accepts no checkpoint."""

    def fence(self, number: int, seen: Seen) -> bool:
        if self.checkpoints(self.store) != seen.checkpoints:
            return False
        self.store.write(f"launches/{number:04d}.accepted.json", b"{}")
        return True


class StateFirst(RemoteRun):
    """Uploads state.json before the files that it lists."""

    def _upload_below(self, name: str, folder: Path) -> None:
        self._complete(name, (folder / STATE_NAME).read_bytes())
        super()._upload_below(name, folder)


class PlainNames(RemoteRun):
    """Uploads to a folder without the launch's number, which other launches upload to as well."""

    def upload(self, folder: Path) -> None:
        name = f"checkpoints/{folder.name}"
        self.lease.check()
        paths = sorted(files_below(folder), key=lambda path: path.name == STATE_NAME)
        self.store.put({f"{name}/{path.relative_to(folder)}": path for path in paths})


class StateLast(RemoteRun):
    """Removes the files of a checkpoint before its state.json."""

    def _remove(self, files: list[str]) -> None:
        super()._remove(files[1:])
        super()._remove(files[:1])


class SharingFolders(FolderBackend):
    """Uses a staging folder that a different launch has created."""

    def create(self, number: int, record: dict[str, Any]) -> bool:
        folder = self.staging(number)
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            self._write(folder, record)
        return True


class ReusingNumbers(FolderBackend):
    """Claims a number that a superseded launch had."""

    def create(self, number: int, record: dict[str, Any]) -> bool:
        (self.run_dir / "launches").mkdir(parents=True, exist_ok=True)
        try:
            self.staging(number).mkdir()
            self._write(self.staging(number), record)
        except (FileExistsError, FileNotFoundError):
            return False
        return True


class FencelessFolder(FolderBackend):
    """Leaves the staging folders of earlier launches."""

    def fence(self, number: int, seen: Seen) -> bool:
        return seen.checkpoints in (None, self.checkpoints())


class FencesOne(FolderBackend):
    """Fences off only the previous launch, which may have died before it fenced off others."""

    def fence(self, number: int, seen: Seen) -> bool:
        folder, older = self.staging(number), self.staging(number - 1)
        if older.is_dir():
            older.rename(folder / older.name)
            with suppress(FileNotFoundError):
                (folder / older.name / "launch.json").rename(older.with_suffix(".json"))
            shutil.rmtree(folder / older.name, ignore_errors=True)
        return seen.checkpoints in (None, self.checkpoints())


class TrustingFolder(FolderBackend):
    """Does not notice that the checkpoints changed."""

    def fence(self, number: int, seen: Seen) -> bool:
        return super().fence(number, seen._replace(checkpoints=None))


class CopiesIntoPlace(FolderMachine):
    """Copies a checkpoint to its name, instead of renaming it."""

    def publish(self, source: Path, target: Path, staging: Path) -> None:
        self.remove(target, staging)
        shutil.copytree(source, target)


class ReplacesUnfenced(FolderMachine):
    """Prepares a checkpoint outside its staging folder, so that the rename is not refused."""

    def publish(self, source: Path, target: Path, staging: Path) -> None:
        aside = self.scratch / f"{staging.name}-{target.name}"
        shutil.copytree(source, aside)
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)


class RemovesInPlace(FolderMachine):
    """Removes a checkpoint file by file."""

    def remove(self, path: Path, staging: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path)


def store_mutant(**changes: Any) -> type[StoreMachine]:
    """Return the machine of launches at a URL with a different `backend` or `remote`."""
    (change,) = changes.values()
    return type(change.__name__, (StoreMachine,), changes)


def folder_mutant(backend: type[FolderBackend]) -> type[FolderMachine]:
    """Return the machine of launches in a folder with a different backend."""
    return type(backend.__name__, (FolderMachine,), {"backend": backend})
