"""Leases with one mistake each, which the state machines must find."""

import shutil
from pathlib import Path
from typing import Any

from shards.base.durable import canonical_json, write_atomically
from tests.train.run.lease.machines import FolderMachine, Lineage, StoreMachine, write_checkpoint
from train.run.checkpoints.checkpoint import STATE_NAME
from train.run.checkpoints.remote import RemoteRun, files_below
from train.run.lease.backend import Backend, Seen
from train.run.lease.folder import FolderBackend
from train.run.lease.store import StoreBackend


def overwrite(self: Backend, number: int, record: dict[str, Any]) -> bool:
    """Write a launch's record even if the number is taken."""
    self.store.write(f"launches/{number:04d}.json", canonical_json(record))
    return True


class Overwriting(StoreBackend):
    """Writes its record even if the number is taken."""

    create = overwrite


class Forgetful(StoreBackend):
    """Does not recognise its own record, so a winner whose reply was lost takes the run over from itself."""

    def create(self, number: int, record: dict[str, Any]) -> bool:
        return self.store.create(f"launches/{number:04d}.json", canonical_json(record))


class Trusting(StoreBackend):
    """Accepts the checkpoints that it finds, even if they changed since the launch chose the one to resume from."""

    def fence(self, number: int, token: str, seen: Seen) -> bool:
        return super().fence(number, token, seen._replace(checkpoints=None))


class Early(StoreBackend):
    """Looks at the checkpoints before it creates its record instead of after."""

    found: dict[str, str]

    def create(self, number: int, record: dict[str, Any]) -> bool:
        self.found = dict(self.checkpoints())
        return super().create(number, record)

    def fence(self, number: int, token: str, seen: Seen) -> bool:
        if self.found != seen.checkpoints:
            return False
        self.store.write(f"launches/{number:04d}.accepted.json", canonical_json(self.found))
        return True


class Fenceless(StoreBackend):
    """Never records which checkpoints it accepts."""

    def fence(self, number: int, token: str, seen: Seen) -> bool:
        return self.is_unchanged(seen)


class Dropping(StoreBackend):
    """Accepts no checkpoint."""

    def fence(self, number: int, token: str, seen: Seen) -> bool:
        if not self.is_unchanged(seen):
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


class OverwritingFolder(FolderBackend):
    """Writes its record even if the number is taken."""

    def create(self, number: int, record: dict[str, Any]) -> bool:
        self.staging(number, record["token"]).mkdir(parents=True)
        return overwrite(self, number, record)


class ClaimsFirst(FolderBackend):
    """Creates its record before its staging folder, which a successor may therefore not find."""

    def create(self, number: int, record: dict[str, Any]) -> bool:
        if not Backend.create(self, number, record):
            return False
        self.staging(number, record["token"]).mkdir(parents=True)
        return True


class FencelessFolder(FolderBackend):
    """Leaves the staging folders of earlier launches."""

    def fence(self, number: int, token: str, seen: Seen) -> bool:
        return self.is_unchanged(seen)


class FencesOne(FolderBackend):
    """Fences off only the previous launch, which may have died before it fenced off others."""

    def fence(self, number: int, token: str, seen: Seen) -> bool:
        own = self.staging(number, token)
        for folder in own.parent.glob(f"{number - 1:04d}.*"):
            folder.rename(own / folder.name)
        return self.is_unchanged(seen)


class TrustingFolder(FolderBackend):
    """Does not notice that the checkpoints changed."""

    def fence(self, number: int, token: str, seen: Seen) -> bool:
        return super().fence(number, token, seen._replace(checkpoints=None))


class CopiesIntoPlace(FolderMachine):
    """Copies a checkpoint to its name, instead of renaming it."""

    def publish(self, source: Path, target: Path, staging: Path) -> None:
        self.remove(target, staging)
        shutil.copytree(source, target)


class RestoresItsFolder(FolderMachine):
    """Creates its staging folder again if a successor has moved it away, and completes the checkpoint there."""

    def write(self, folder: Path, token: str, lineage: Lineage) -> None:
        write_checkpoint(folder, token, lineage, write_atomically)


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
