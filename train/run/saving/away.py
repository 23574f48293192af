"""A run folder at an address. A launch works in a folder of its machine, and puts there what it saves.

ADDRESS/launches/0004.json            who it is; created by the launch that takes the run, if nobody has that number
                 0004.sign            its sign of life, written anew all the time
                 0004.accepted.json   the checkpoints that it found; it puts none before this is there
       /checkpoints/step-00001000/    as in any run folder; state.json comes last, and says which launch put it
       /config.yaml, metrics.jsonl, … as of the newest checkpoint

An object store has no renames, so a launch that slept and wakes cannot be kept from writing. But nobody reads it: a run
is what its newest launch accepted, and what that launch put. The newest is looked up before every put, and before
checkpoints are removed. Launch 5 accepts after it was created, so what 4 removed after such a look, it had replaced by
then.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shards.base.durable import DamagedFile, canonical_json, fsync_tree, parse_sealed_json
from shards.base.errors import Outage, RequestError, WorkError
from shards.base.store import Place, Store
from shards.open import open_store
from train.run.launches import TRACKER_ID, described, is_over, now, who_is_this
from train.run.saving.checkpoint import LINES, STATE_NAME, Checkpoint, list_checkpoints, step_of, verify_checkpoint

PRIVATE = {"checkpoints", "launches", "posthoc"}
"""Of a run folder: what is not put as it lies there."""
FIRST_PAUSE, LONGEST_PAUSE, PATIENCE = 2.0, 60.0, 900.0
"""Seconds: between tries to put a checkpoint while the store is out of reach, and until that ends the run."""


def work_folder(place: Place, shelf: str = "runs") -> Path:
    """Where this machine has a run: in its run folder, or, of one at an address, in the temporary folder.

    Args:
        shelf: `runs`, of the launch that holds it; `read`, of those who only take its weights.
    """
    if isinstance(place, Path):
        return place
    name = hashlib.sha256(place.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"latentmill-{shelf}-{os.getuid()}" / name / place.rpartition("/")[2]


def wait_until_free(store: Store, patience: float) -> int:
    """Wait until the newest launch has ended, or died, or gave no sign of life for `patience` seconds; its number.

    Raises:
        RequestError: it is alive, or another one began meanwhile.
    """
    first, deadline = newest_sign(store), time.monotonic() + patience
    while True:
        number, sign = newest_sign(store)
        if number == 0 or is_over(record := read_record(store, number)):
            return number
        if (number, sign) != first:
            raise in_use(store, number, record)
        if time.monotonic() > deadline:
            return number
        time.sleep(min(1.0, patience / 10))


def newest_sign(store: Store) -> tuple[int, str]:
    """Number of the launch that took the run last, and what changes with its signs of life; (0, ""): there was none."""
    etags = {name: entry.etag for name, entry in store.listing("launches").items()}
    number = max((int(name.partition(".")[0]) for name in etags), default=0)
    return number, etags.get(f"{number:04d}.sign", "")


def read_record(store: Store, number: int) -> dict[str, Any]:
    """Who a launch is, with what its last sign said."""
    files = store.read_many([f"launches/{number:04d}.json", f"launches/{number:04d}.sign"])
    return {name: value for data in files.values() for name, value in json.loads(data).items()}


def in_use(store: Store, number: int, record: dict[str, Any]) -> RequestError:
    """That another launch holds the run."""
    return RequestError(
        f"{store.where()} is in use: {described(number, record)} trains in it, and one launch at a time may. "
        f"Wait for its end, stop it, or give another run_dir."
    )


def find_checkpoints(store: Store) -> dict[str, str]:
    """The checkpoints that make up the run: those that its newest launch accepted, and those that it put.

    Returns:
        Their folders' names → SHA-256 of their state.json.
    """
    accepting = [int(name[:-14]) for name in store.files("launches") if name.endswith(".accepted.json")]
    number = max(accepting, default=0)
    accepted = json.loads(store.read(f"launches/{number:04d}.accepted.json")) if number else {}
    states = [f"checkpoints/{name}" for name in store.files("checkpoints") if name.endswith(f"/{STATE_NAME}")]
    found = {}
    for name, data in store.read_many(states).items():
        folder, sha256 = name.split("/")[1], hashlib.sha256(data).hexdigest()
        try:
            launch = parse_sealed_json(data, store.where(name)).get("launch")
        except DamagedFile as error:
            print(f"checkpoint {folder} is damaged and passed over: {error}", flush=True)
            continue
        if launch == number or accepted.get(folder) == sha256 or number == 0:
            found[folder] = sha256
    return found


def bring(store: Store, work: Path) -> dict[str, str]:
    """Have the newest sound checkpoint of the run in `work`, and no other; returns what `find_checkpoints` does.

    Raises:
        RequestError: there are checkpoints, and all are damaged.
    """
    found = find_checkpoints(store)
    work.mkdir(parents=True, exist_ok=True)
    bring_tracker_id(store, work)
    for folder in list_checkpoints(work):
        if sha256_of_state(folder) != found.get(folder.name):
            shutil.rmtree(folder)
    for name in sorted(found, key=lambda name: step_of(Path(name)), reverse=True):
        try:
            checkpoint = fetch(store, work, name)
        except DamagedFile as error:
            print(f"checkpoint {name} is damaged and passed over: {error}", flush=True)
            continue
        for path in sorted((checkpoint.folder / LINES).glob("*")):
            shutil.copyfile(path, work / path.name)
        return found
    if found:
        raise RequestError(
            f"Every checkpoint of {store.where()} is damaged ({', '.join(sorted(found))}). Restore one from a copy; or "
            f"give another run_dir to train from the start."
        )
    for path in work.glob("*.jsonl"):
        path.unlink()
    return found


def bring_tracker_id(store: Store, work: Path) -> None:
    """The run's id in its tracker, where it has one."""
    with suppress(FileNotFoundError):
        store.get(TRACKER_ID, work / TRACKER_ID)


def sha256_of_state(folder: Path) -> str | None:
    """Of a checkpoint's state.json; None where there is none."""
    path = folder / STATE_NAME
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def fetch(store: Store, work: Path, name: str) -> Checkpoint:
    """The checkpoint `step-…` in the folder of this machine, whole; copied there unless it is there already.

    Raises:
        DamagedFile: what is missing at the address, or differs.
    """
    target = work / "checkpoints" / name
    try:
        return verify_checkpoint(target)
    except DamagedFile:
        shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}.", dir=target.parent) as private:
        copy = Path(private) / name
        for file in store.files(f"checkpoints/{name}"):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            try:
                store.get(f"checkpoints/{name}/{file}", copy / file)
            except FileNotFoundError:
                continue  # it went meanwhile; whether it is missed, its state.json says
        verify_checkpoint(copy)
        fsync_tree(copy)
        copy.rename(target)
    return verify_checkpoint(target)


def take(address: str, number: int, found: dict[str, str], patience: float = PATIENCE) -> "Away":
    """Take the run over from the launch of this number; of several at once, one does.

    Args:
        found: what `bring` returned.
        patience: seconds of an outage after which a checkpoint counts as not put.

    Raises:
        RequestError: another launch did.
        WorkError: the launch before, which slept, changed the checkpoints meanwhile.
    """
    store, away, token = open_store(address), Away(address, number + 1, patience), uuid.uuid4().hex
    name = f"launches/{away.number:04d}.json"
    created = store.create(name, canonical_json(who_is_this() | {"token": token}))
    # where the reply was lost and the request made again, the winner too is told that it is there
    if not created and json.loads(store.read(name)).get("token") != token:
        raise in_use(store, away.number, read_record(store, away.number))
    if find_checkpoints(store) != found:
        away.sign(ended=now())
        raise WorkError(
            f"The checkpoints of {address} changed while this launch was starting: the one before it was not dead. The "
            f"same command again goes on from its newest checkpoint."
        )
    store.write(f"launches/{away.number:04d}.accepted.json", canonical_json(found))
    return away


class Away:
    """The run's address, for the launch that holds it."""

    def __init__(self, address: str, number: int, patience: float = PATIENCE):
        self.address, self.number, self.store, self.patience = address, number, open_store(address), patience

    def sign(self, **fields: Any) -> None:
        """Give a sign of life, or of its end."""
        self.store.write(f"launches/{self.number:04d}.sign", canonical_json({"time": time.time_ns(), **fields}))

    def check(self) -> None:
        """See that nobody has taken over.

        Raises:
            RequestError: somebody has.
        """
        newest, _ = newest_sign(self.store)
        if newest != self.number:
            raise RequestError(
                f"{self.address} is in use: {described(newest, read_record(self.store, newest))} took it over from "
                f"this launch, {self.number}, which gave no sign of life for longer than takeover_after. Nothing that "
                f"this one did since is in the run."
            )

    def put(self, folder: Path, work: Path) -> None:
        """A checkpoint of the folder `work` => the address, in place of what has its name; state.json last.

        Raises:
            Outage: the store was out of reach for `patience` seconds.
            RequestError: another launch has taken over.
        """
        name, pause, deadline = folder.relative_to(work).as_posix(), FIRST_PAUSE, time.monotonic() + self.patience
        while True:
            try:
                before = self._files(name)
                self.check()
                self._remove(before)
                files = {f"{name}/{path.relative_to(folder).as_posix()}": path for path in files_below(folder)}
                state = files.pop(f"{name}/{STATE_NAME}")
                self.store.put(files)
                self.check()
                self.store.write(f"{name}/{STATE_NAME}", state.read_bytes())
                break
            except Outage as error:
                if time.monotonic() + pause > deadline:
                    raise
                print(f"{name} is not at {self.address} yet: {error} Tried again in {pause:g} s.", flush=True)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        try:
            self.share(work)
        except Outage as error:  # the checkpoint is there; the next one brings the rest along
            print(f"{self.address} has no newer logs yet: {error}", flush=True)

    def share(self, work: Path) -> None:
        """Config, metrics, plot and tracker's files, as they are now."""
        tops = [path for path in work.iterdir() if path.name not in PRIVATE]  # in those, others write meanwhile
        shared = [path for top in tops for path in (files_below(top) if top.is_dir() else [top])]
        self.store.put({path.relative_to(work).as_posix(): path for path in shared})

    def drop_old(self, step: int, choose: Callable[[dict[int, float]], list[int]]) -> None:
        """Remove checkpoints up to `step`: what is not the run's, and what is chosen of step → age in seconds.

        Raises:
            RequestError: another launch has taken over.
        """
        entries = self.store.listing("checkpoints")
        modified = {name.split("/")[0]: e.modified for name, e in entries.items() if name.endswith(f"/{STATE_NAME}")}
        ages = {step_of(Path(name)): time.time() - seconds for name, seconds in modified.items()}
        ours = {step_of(Path(name)) for name in find_checkpoints(self.store)}
        past = {found: age for found, age in ages.items() if found <= step}
        old = choose({found: past[found] for found in past.keys() & ours})
        names = [self._files(f"checkpoints/step-{found:08d}") for found in sorted({*old} | past.keys() - ours)]
        self.check()
        for files in names:
            self._remove(files)

    def _files(self, name: str) -> list[str]:
        """Of a checkpoint, as it lies there; state.json first, without which it is none."""
        files = (f"{name}/{file}" for file in self.store.files(name))
        return sorted(files, key=lambda file: Path(file).name != STATE_NAME)

    def _remove(self, files: list[str]) -> None:
        for part in (files[:1], files[1:]):
            if part:
                self.store.remove(part)


def files_below(folder: Path) -> list[Path]:
    """Every file, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())
