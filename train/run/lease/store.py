"""Leases of a run at an object-store URL, where readers ignore the uploads of a superseded launch.

URL/launches/                      records and heartbeats (backend.py)
            /0004.accepted.json    the checkpoints that launch 4 found; it uploads none until this file exists

An object store has no renames, so nothing can keep a superseded launch from writing when it wakes up. Readers therefore
count only the checkpoints that the newest launch accepted, and those that carry its token.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from shards.base.durable import canonical_json
from shards.base.store import STAGING_FOLDER, Store
from train.run.lease.backend import Backend, Seen

ACCEPTED = ".accepted.json"


class Accepted(NamedTuple):
    """The checkpoints that belong to a run: those that its newest launch accepted or wrote."""

    token: str
    checkpoints: Mapping[str, str]
    """SHA-256 of the state.json of each accepted checkpoint, by name."""

    def includes(self, name: str, sha256: str, token: str | None) -> bool:
        """Return whether a checkpoint belongs to the run. `token`: the token in its state.json."""
        return token == self.token or self.checkpoints.get(name) == sha256


def read_accepted(store: Store) -> Accepted | None:
    """Read which checkpoints the newest launch accepted; None: no launch has recorded this yet."""
    names = (name.removesuffix(ACCEPTED) for name in store.files("launches") if name.endswith(ACCEPTED))
    numbers = [int(name) for name in names if name.isdecimal()]
    if not numbers:
        return None
    name = f"launches/{max(numbers):04d}"
    return Accepted(json.loads(store.read(f"{name}.json"))["token"], json.loads(store.read(f"{name}{ACCEPTED}")))


class StoreBackend(Backend):
    """Leases of a run at an object-store URL.

    Each launch works in a local folder that is named after its token, so launches on the same machine share no files.
    """

    interval = 5.0

    def __init__(self, store: Store, copies: Path, checkpoints: Callable[[], Mapping[str, str]]):
        """`copies`: local folder that contains the folders of the launches."""
        super().__init__(store, checkpoints)
        self.copies = copies

    def fence(self, number: int, token: str, seen: Seen) -> bool:
        found = dict(self.checkpoints())
        if seen.checkpoints is not None and found != dict(seen.checkpoints):
            return False
        self.store.write(f"launches/{number:04d}{ACCEPTED}", canonical_json({**found, **seen.orphans}))
        return True

    def staging(self, number: int, token: str) -> Path:
        return self.copies / token / self.place.rpartition("/")[2] / STAGING_FOLDER / f"{number:04d}.{token}"
