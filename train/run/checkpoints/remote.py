"""A run folder at an address. A launch works in a folder of its machine, and puts there what it saves.

ADDRESS/launches/0004.json            who it is; created by the launch that takes the run, if nobody has that number
                 0004.sign            its sign of life, written anew all the time
                 0004.accepted.json   the checkpoints that it found; it puts none before this is there
       /checkpoints/step-00001000.0004/   a checkpoint by launch 4, laid out as in a run folder; state.json comes last
       /config.yaml, metrics.jsonl, … as of the newest checkpoint

An object store has no renames, so nothing can keep a stale launch, one that was suspended and then superseded, from
writing when it wakes up. It does no harm, for three reasons:

- Each launch uploads to folders that carry its number, so no launch ever overwrites or removes a file that a later one
  has written. state.json is created if absent; one with a different content is an error.
- Readers ignore what a stale launch uploads: the run consists of the checkpoints that its newest launch accepted, and
  of those that carry that launch's token.
- A launch lists what it will remove before it checks that it still holds the run. Launch 5 accepts after it was
  created, so whatever launch 4 removes after such a check, it had already replaced.
"""

import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from shards.base.durable import canonical_json
from shards.base.errors import Outage, RequestError, WorkError
from shards.base.store import Store
from shards.open import open_store
from train.run.checkpoints.checkpoint import STATE_NAME, step_of
from train.run.checkpoints.local_copy import find_checkpoints, parse_folder, remote_folder, stored_checkpoints
from train.run.launches import described, is_over, now, who_is_this

PRIVATE = {"checkpoints", "launches", "posthoc"}
"""Of a run folder: what is not put as it lies there."""
FIRST_PAUSE, LONGEST_PAUSE, PATIENCE = 2.0, 60.0, 900.0
"""Seconds: between tries to put a checkpoint while the store is out of reach, and until that ends the run."""


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


def take(
    address: str,
    number: int,
    found: Mapping[str, str],
    patience: float = PATIENCE,
    ahead: Mapping[str, str] | None = None,
) -> "RemoteRun":
    """Take the run over from the launch of this number; of several at once, one does.

    Args:
        found: what `bring` returned.
        patience: seconds of an outage after which a checkpoint counts as not put.
        ahead: the like of `found`, of a checkpoint that is accepted before it is there.

    Raises:
        RequestError: another launch did.
        WorkError: the launch before, which slept, changed the checkpoints meanwhile.
    """
    store, away = open_store(address), RemoteRun(address, number + 1, patience, token := uuid.uuid4().hex)
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
    store.write(f"launches/{away.number:04d}.accepted.json", canonical_json({**found, **(ahead or {})}))
    return away


class RemoteRun:
    """The run's address, for the launch that holds it."""

    def __init__(self, address: str, number: int, patience: float = PATIENCE, token: str = ""):
        self.address, self.number, self.store, self.patience = address, number, open_store(address), patience
        self.token = token
        """Which no other launch has, of this run or of another one that lay here."""

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
        """Upload a checkpoint of the run folder `work`, state.json last.

        Raises:
            Outage: the store was out of reach for `patience` seconds.
            RequestError: another launch has taken over.
            WorkError: another run's launch of the same number uploaded that checkpoint.
        """
        state, is_snapshot = (folder / STATE_NAME).read_bytes(), folder.parents[1] != work
        plain = folder.relative_to(work).as_posix()
        name = plain if is_snapshot else remote_folder(folder.name, self.number)

        def put() -> None:
            if is_snapshot:  # which no run resumes from, and people copy: it keeps its name, in place of an earlier one
                before = self._files(plain)
                self.check()
                self._remove(before)
            self.check()
            self._put_below(name, folder)
            self._complete(name, state)

        self._patiently(name, put)
        self._share_if_possible(work)

    def put_share(self, step: str, folder: Path, receipt: str, hashes: Mapping[str, str]) -> None:
        """Upload what one of several processes wrote of the checkpoint `step`; then its receipt, which has `hashes`.

        Raises: as `put`.
        """
        name = remote_folder(step, self.number)

        def put() -> None:
            self.check()
            self._put_below(name, folder)
            self.store.write(f"{name}/{receipt}", canonical_json(hashes))

        self._patiently(name, put)

    def complete(self, step: str, files: Collection[str], state: bytes, work: Path) -> None:
        """Make a checkpoint of the `files` that several processes uploaded: remove all others, and add state.json.

        Raises: as `put`.
        """
        name = remote_folder(step, self.number)

        def put() -> None:
            kept = {f"{name}/{file}" for file in (*files, STATE_NAME)}
            if others := [file for file in self._files(name) if file not in kept]:
                self.check()
                self.store.remove(others)
            self._complete(name, state)

        self._patiently(name, put)
        self._share_if_possible(work)

    def read_share(self, step: str, receipt: str) -> bytes:
        """Read the receipt of another process's share of the checkpoint `step`.

        Raises:
            FileNotFoundError: it is not there yet.
        """
        return self.store.read(f"{remote_folder(step, self.number)}/{receipt}")

    def _complete(self, name: str, state: bytes) -> None:
        self.check()
        file = f"{name}/{STATE_NAME}"
        # where the reply was lost, and the request made again, the file is there and has this launch's bytes
        if not self.store.create(file, state) and self.store.read(file) != state:
            raise WorkError(
                f"{self.store.where(file)} was written by a launch with this one's number, {self.number}: the run was "
                f"deleted and started again while this launch was suspended, or its state.json was edited. Nothing was "
                f"overwritten. Run the command again to resume from the newest checkpoint."
            )

    def _patiently(self, name: str, put: Callable[[], None]) -> None:
        pause, deadline = FIRST_PAUSE, time.monotonic() + self.patience
        while True:
            try:
                return put()
            except Outage as error:
                if time.monotonic() + pause > deadline:
                    raise
                print(f"{name} is not at {self.address} yet: {error} Tried again in {pause:g} s.", flush=True)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _put_below(self, name: str, folder: Path) -> None:
        paths = {path.relative_to(folder).as_posix(): path for path in files_below(folder)}
        self.store.put({f"{name}/{file}": path for file, path in paths.items() if file != STATE_NAME})

    def _share_if_possible(self, work: Path) -> None:
        try:
            self.share(work)
        except Outage as error:  # the checkpoint is there; the next one brings the rest along
            print(f"{self.address} has no newer logs yet: {error}", flush=True)

    def share(self, work: Path) -> None:
        """Config, metrics, plot and tracker's files, as they are now.

        Raises:
            RequestError: another launch has taken over.
        """
        self.check()
        tops = [path for path in work.iterdir() if path.name not in PRIVATE]  # in those, others write meanwhile
        shared = [path for top in tops for path in (files_below(top) if top.is_dir() else [top])]
        self.store.put({path.relative_to(work).as_posix(): path for path in shared})

    def drop_logs(self, choose: Callable[[Collection[str]], list[str]]) -> None:
        """Remove the kept output of those launches that are chosen of all, by their folders' names."""
        names = self.store.files("logs")
        old = choose({name.partition("/")[0] for name in names})
        if files := [f"logs/{name}" for name in names if name.partition("/")[0] in old]:
            self.store.remove(files)

    def drop_old(self, step: int, choose: Callable[[dict[int, float]], list[int]]) -> None:
        """Remove checkpoints up to `step`: what is not the run's, and what is chosen of step → age in seconds.

        Raises:
            RequestError: another launch has taken over.
        """
        entries, ages, kept = self.store.listing("checkpoints"), dict[int, float](), dict[int, str]()
        for name, stored in stored_checkpoints(self.store).items():
            folder = stored.folder.removeprefix("checkpoints/")
            state = entries.get(f"{folder}/{STATE_NAME}")
            if step_of(Path(name)) <= step and state is not None:
                ages[step_of(Path(name))] = time.time() - state.modified
                kept[step_of(Path(name))] = folder
        for old in choose(ages):
            del kept[old]
        # interrupted uploads, and those of stale launches, go as well
        gone = {folder for name in entries if (folder := name.partition("/")[0]) not in kept.values()}
        names = [
            self._files(f"checkpoints/{folder}")
            for folder in sorted(gone)
            if (parsed := parse_folder(folder)) and step_of(Path(parsed[0])) <= step
        ]
        self.check()
        for files in names:
            self._remove(files)

    def _files(self, name: str) -> list[str]:
        """Of a checkpoint, as it lies there; state.json first, without which it is none."""
        files = (f"{name}/{file}" for file in self.store.files(name))
        return sorted(files, key=lambda file: Path(file).name != STATE_NAME)

    def _remove(self, files: list[str]) -> None:
        for some in (files[:1], files[1:]):
            if some:
                self.store.remove(some)


def files_below(folder: Path) -> list[Path]:
    """Every file, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())
