"""The lease of a run as a simulation: launches that acquire a run, save checkpoints and lose it, call by call.

Each checkpoint records its lineage: the tokens of the launches that trained its steps. The invariants say that readers
always see one lineage, that every visible checkpoint is complete, and that nothing is lost that was saved by a launch
while it was the newest.
"""

import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shards.base.durable import DamagedFile, sealed_json, write_file
from shards.base.errors import RequestError, WorkError
from shards.base.store import STAGING_FOLDER, Store
from tests.interleaving import Handing, InterleavingMachine, InThread, Program, Running, Shared, ask
from train.run.checkpoints.checkpoint import (
    VERSION,
    checkpoint_identities,
    list_checkpoints,
    step_folder,
    step_of,
    verify_checkpoint,
)
from train.run.checkpoints.local_copy import find_checkpoints, stored_checkpoints
from train.run.checkpoints.remote import RemoteRun
from train.run.lease import folder as folder_lease
from train.run.lease import lease as leases
from train.run.lease.backend import Seen
from train.run.lease.folder import FolderBackend
from train.run.lease.lease import Lease, wait_until_free
from train.run.lease.store import StoreBackend

TTL = 1.0
SAVES = 3
FILE = "unet/weights"
Lineage = list[str]


class Clock:
    """Stands for the module `time`, in simulated time. A sleeping launch oversleeps, as on a busy machine."""

    shared = Shared()

    def monotonic(self) -> float:
        """Return the seconds of the running machine."""
        return self.shared.now

    def sleep(self, seconds: float) -> None:
        """Let time pass, as a call."""
        ask(("sleep", 4 * seconds))


CLOCK = Clock()
FILE_OPERATIONS = ("mkdir", "rename", "replace", "link", "rmdir", "unlink", "utime", "scandir", "listdir", "open")


def patch_modules(patches: pytest.MonkeyPatch) -> None:
    """Make leases use simulated time, and make each file operation of a program a call."""

    def handing_over(operation: Callable[..., Any]) -> Callable[..., Any]:
        def hand_over(*arguments: Any, **options: Any) -> Any:
            ask(("file", (operation.__name__, str(arguments[0]))))
            return operation(*arguments, **options)

        return hand_over

    patches.setattr(leases, "time", CLOCK)
    for name in FILE_OPERATIONS:
        patches.setattr(os, name, handing_over(getattr(os, name)))
    patches.setattr(io, "open", handing_over(io.open))


class LeaseMachine(InterleavingMachine):
    """Up to three launches of one run at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = Path(tempfile.mkdtemp(prefix="lease-"))
        self.number = 0
        self.records: dict[str, str] = {}
        """Record of a launch → its token."""
        self.settled = ""
        """Record of the launch that was found to have fenced off all earlier ones."""
        self.seen: dict[int, Lineage] = {}
        self.durable: Lineage = []
        """Lineage of the newest checkpoint that a launch saved while it was the newest launch."""
        CLOCK.shared = self.shared

    def launch(self, folder: Path) -> Program:
        """Acquire the run, and save SAVES checkpoints after the newest one. `folder`: the launch's own local folder."""
        raise NotImplementedError

    def visible(self) -> dict[int, Lineage]:
        """Return step → lineage of the checkpoints that readers see, each of which must be complete."""
        raise NotImplementedError

    def tokens(self) -> dict[str, str]:
        """Return the record of each launch → its token."""
        raise NotImplementedError

    def is_settled(self) -> bool:
        """Return whether the newest launch has fenced off all earlier ones."""
        raise NotImplementedError

    def start(self) -> None:
        """Start a launch, on a machine of its own."""
        self.number += 1
        self.begin("launch", self.launch(self.scratch / str(self.number)))

    def launches_are_unique(self) -> None:
        """Records never change, and no launch acquires the run twice."""
        now = self.tokens()
        for name, token in self.records.items():
            assert now.get(name, token) == token, f"{name} was overwritten"
        self.records |= now
        assert len(set(self.records.values())) == len(self.records), "a launch took the run over from itself"

    def readers_see_one_lineage(self) -> None:
        """Visible checkpoints extend each other, and nothing that was durable is lost."""
        found = self.visible()
        lineages = [found[step] for step in sorted(found)]
        for step, lineage in found.items():
            assert len(lineage) == step
        for earlier, later in pairwise(lineages):
            assert later[: len(earlier)] == earlier, "checkpoints of two lineages are visible"
        newest = lineages[-1] if lineages else []
        assert newest[: len(self.durable)] == self.durable, "a durable checkpoint was lost"
        records = self.tokens()
        if self.settled and self.settled == max(records):
            for step, lineage in found.items():
                is_own = lineage[-1] == records[self.settled]
                assert is_own or self.seen.get(step) == lineage, "a superseded launch changed the run"
        self.seen = found
        if self.is_settled():
            self.settled, self.durable = max(records), newest

    def actions(self) -> list[Callable[[], None]]:
        return [self.start] if self.count("launch") < 3 else []

    def time_passes(self, share: float) -> None:
        self.shared.now += share * TTL

    def check(self) -> None:
        self.launches_are_unique()
        self.readers_see_one_lineage()

    def run_last(self) -> None:
        before = len(self.durable)
        self.start()
        self.finish(0)
        self.check()
        assert self.is_settled() and len(self.durable) >= before + SAVES, "the last launch made no progress"

    def play(self, scenario: Callable[[Any], None]) -> None:
        try:
            super().play(scenario)
        finally:
            shutil.rmtree(self.scratch)


def write_checkpoint(
    folder: Path, token: str, lineage: Lineage, write: Callable[[Path, bytes], Any] = write_file
) -> None:
    """Write a checkpoint of one small file.

    The folder above it must exist. It is not created, because a superseded launch's folder must stay away.

    Args:
        write: writes state.json.
    """
    folder.mkdir()
    (folder / FILE).parent.mkdir()
    (folder / FILE).write_text(json.dumps(lineage))
    files = {FILE: hashlib.sha256((folder / FILE).read_bytes()).hexdigest()}
    content = {"version": VERSION, "token": token, "lineage": lineage, "files": files}
    write(folder / "state.json", sealed_json(content))


class StoreMachine(LeaseMachine):
    """Launches of a run at an object-store URL."""

    backend: type[StoreBackend] = StoreBackend
    remote: type[RemoteRun] = RemoteRun

    def launch(self, folder: Path) -> Program:
        def work(store: Store) -> None:
            backend = self.backend(store, folder, partial(find_checkpoints, store))
            try:
                free = wait_until_free(backend, TTL)
                stored, lineage = stored_checkpoints(store), Lineage()
                if stored:
                    lineage = json.loads(store.read(f"{stored[max(stored)].folder}/state.json"))["lineage"]
                seen = Seen(free, {name: each.sha256 for name, each in stored.items()})
                lease = Lease.acquire(backend, TTL, seen)
            except (RequestError, WorkError, FileNotFoundError):
                return
            remote = self.remote(store, lease)
            try:
                for _ in range(SAVES):
                    lineage = [*lineage, lease.token]
                    target = step_folder(lease.run_dir, len(lineage))
                    target.parent.mkdir(parents=True, exist_ok=True)
                    write_checkpoint(target, lease.token, lineage)
                    remote.upload(target)
                    lease.renew()
                    remote.drop_old(len(lineage), lambda ages: sorted(ages)[:-2])
                lease.release()
            except RequestError:  # superseded
                return

        return InThread(work, moves=False).program()

    def reader(self) -> Store:
        """A store whose calls are performed at once."""
        return Handing(self.shared.do, moves=False)

    def visible(self) -> dict[int, Lineage]:
        store, found = self.reader(), {}
        for name, stored in stored_checkpoints(store).items():
            content = json.loads(store.read(f"{stored.folder}/state.json"))
            for file, sha256 in content["files"].items():
                data = self.shared.files.get(f"{stored.folder}/{file}", (b"",))[0]
                assert hashlib.sha256(data).hexdigest() == sha256, f"{stored.folder} is not complete"
            found[int(name.removeprefix("step-"))] = content["lineage"]
        return found

    def tokens(self) -> dict[str, str]:
        records = (name for name in self.shared.files if name.startswith("launches/") and name.count(".") == 1)
        return {name: json.loads(self.shared.files[name][0])["token"] for name in records if name.endswith(".json")}

    def is_settled(self) -> bool:
        return bool(records := self.tokens()) and max(records).replace(".json", ".accepted.json") in self.shared.files


class FolderMachine(LeaseMachine):
    """Launches of a run in a folder, with every file operation as a call."""

    backend: type[FolderBackend] = FolderBackend

    def write(self, folder: Path, token: str, lineage: Lineage) -> None:
        """Write a checkpoint into the launch's staging folder."""
        write_checkpoint(folder, token, lineage)

    def publish(self, source: Path, target: Path, staging: Path) -> None:
        """Give a checkpoint its name."""
        folder_lease.publish(source, target, staging)

    def remove(self, path: Path, staging: Path) -> None:
        """Remove a checkpoint."""
        folder_lease.remove(path, staging)

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return self.scratch / "run"

    def launch(self, folder: Path) -> Program:
        run_dir = self.run_dir

        def work(store: Store) -> None:
            backend = self.backend(run_dir, partial(checkpoint_identities, run_dir))
            try:
                free = wait_until_free(backend, TTL)
                identities, lineage = checkpoint_identities(run_dir), Lineage()
                if folders := list_checkpoints(run_dir):
                    lineage = verify_checkpoint(folders[-1]).content["lineage"]
                lease = Lease.acquire(backend, TTL, Seen(free, identities))
            except (RequestError, WorkError, FileNotFoundError):
                return
            try:
                for _ in range(SAVES):
                    lineage = [*lineage, lease.token]
                    target = step_folder(run_dir, len(lineage))
                    self.write(lease.folder / target.name, lease.token, lineage)
                    target.parent.mkdir(exist_ok=True)
                    self.publish(lease.folder / target.name, target, lease.folder)
                    lease.renew()
                    for old in list_checkpoints(run_dir)[:-2]:
                        self.remove(old, lease.folder)
                lease.release()
            except (RequestError, FileNotFoundError):  # superseded
                return

        return InThread(work, moves=True).program()

    def perform_last(self, running: Running) -> None:
        self.reply(running, None)

    def may_be_late(self, running: Running) -> bool:
        return False

    def visible(self) -> dict[int, Lineage]:
        found = {}
        for folder in list_checkpoints(self.run_dir):
            try:
                found[step_of(folder)] = verify_checkpoint(folder).content["lineage"]
            except DamagedFile as error:
                raise AssertionError(f"{folder} is not complete") from error
        return found

    def tokens(self) -> dict[str, str]:
        records = (self.run_dir / "launches").glob("*.json")
        return {path.name: json.loads(path.read_bytes())["token"] for path in records}

    def is_settled(self) -> bool:
        newest = max(self.tokens(), default="")
        folders = (self.run_dir / STAGING_FOLDER).glob("[0-9][0-9][0-9][0-9].*")
        return bool(newest) and all(folder.name[:4] >= newest[:4] for folder in folders)
