"""Leases at an object-store URL, where readers ignore what a superseded launch uploads.

ADDRESS/launches/0004.json            record of a launch, created if absent
                 0004.sign            its heartbeat and notes, overwritten with every heartbeat
                 0004.accepted.json   the checkpoints that it found; it uploads none before this exists

An object store has no renames, so nothing can keep a superseded launch from writing when it wakes up. Readers therefore
count only the checkpoints that the newest launch accepted, and those that carry its token.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shards.base.durable import canonical_json
from shards.base.store import Store
from train.run.lease.lease import Heartbeat, Seen

ACCEPTED = ".accepted.json"


class Accepted(NamedTuple):
    """Which checkpoints make up a run: those that its newest launch accepted, and those that it wrote."""

    token: str
    checkpoints: Mapping[str, str]
    """Name → SHA-256 of state.json."""

    def includes(self, name: str, sha256: str, token: str | None) -> bool:
        """Return whether a checkpoint is part of the run. `token`: from its state.json."""
        return token == self.token or self.checkpoints.get(name) == sha256


def read_accepted(store: Store) -> Accepted | None:
    """Read which checkpoints the newest launch accepted; None: no launch has accepted any."""
    numbers = [int(name.removesuffix(ACCEPTED)) for name in store.files("launches") if name.endswith(ACCEPTED)]
    if not numbers:
        return None
    name = f"launches/{max(numbers):04d}"
    return Accepted(json.loads(store.read(f"{name}.json"))["token"], json.loads(store.read(f"{name}{ACCEPTED}")))


class StoreBackend:
    """Leases of a run at an object-store URL.

    Each launch works in a local folder that is named by its token, so launches on one machine share no files.
    """

    interval = 5.0

    def __init__(self, store: Store, copies: Path, checkpoints: Callable[[Store], Mapping[str, str]]):
        """`copies`: local folder of the launches' folders; `checkpoints`: name → SHA-256 of those that readers see."""
        self.store, self.copies, self.checkpoints = store, copies, checkpoints
        self.place = store.where().rstrip("/")

    def newest(self) -> Heartbeat:
        marks = {name: entry.etag for name, entry in self.store.listing("launches").items()}
        number = max((int(name.partition(".")[0]) for name in marks), default=0)
        return Heartbeat(number, marks.get(f"{number:04d}.sign", ""))

    def read(self, number: int) -> dict[str, Any]:
        names = [f"launches/{number:04d}.json", f"launches/{number:04d}.sign"]
        files = self.store.read_many(names)
        return {key: value for name in names if name in files for key, value in json.loads(files[name]).items()}

    def create(self, number: int, record: dict[str, Any]) -> bool:
        return self.store.create(f"launches/{number:04d}.json", canonical_json(record))

    def beat(self, number: int, notes: dict[str, Any]) -> None:
        self.store.write(f"launches/{number:04d}.sign", canonical_json({"time": time.time_ns(), **notes}))

    def fence(self, number: int, seen: Seen) -> bool:
        found = self.checkpoints(self.store)
        if seen.checkpoints not in (None, found):
            return False
        self.store.write(f"launches/{number:04d}{ACCEPTED}", canonical_json({**found, **seen.orphans}))
        return True

    def staging(self, number: int, token: str) -> Path:
        return self.copies / token / self.place.rpartition("/")[2] / "launches" / f"{number:04d}"
