"""Storage of leases, which consist of numbered records, created only if absent, and heartbeats.

RUN/launches/0004.json   record of launch 4: its process, and a random token; never changed or removed
            /0004.sign   its heartbeat and notes, overwritten with every heartbeat

RUN is a folder or an object-store URL. The two differ only in how a launch fences off earlier launches.
"""

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shards.base.durable import canonical_json
from shards.base.store import Store


class Heartbeat(NamedTuple):
    """The newest launch of a run, and its last heartbeat."""

    number: int = 0
    """Number of the launch; 0: the run has no launch yet."""
    mark: str = ""
    """Opaque tag that changes with every heartbeat."""


class Seen(NamedTuple):
    """The state of a run as a launch saw it while preparing."""

    free: Heartbeat | None = None
    """Result of `wait_until_free`; None: it has not been called yet."""
    checkpoints: Mapping[str, str] | None = None
    """Identity of each checkpoint that readers saw, by name, from `Backend.checkpoints`; None: it is not compared."""
    orphans: Mapping[str, str] = {}
    """Identity of each checkpoint to accept although it was never uploaded, by name."""


class Backend(ABC):
    """Leases of one run. Every method is atomic, or can safely be interrupted at any point."""

    interval: float
    """Seconds between heartbeats."""

    def __init__(self, store: Store, checkpoints: Callable[[], Mapping[str, str]]):
        """`checkpoints`: returns the identity of each checkpoint that readers see, by name."""
        self.store, self.checkpoints = store, checkpoints

    @property
    def place(self) -> str:
        """Folder or URL of the run, for messages."""
        return self.store.where().rstrip("/")

    def newest(self) -> Heartbeat:
        """Return the newest launch, whether or not it is still running."""
        marks = {name: entry.etag for name, entry in self.store.listing("launches").items()}
        numbers = (re.match(r"\d{4,}(?=\.)", name) for name in marks)  # file systems and editors may add other files
        number = max((int(found[0]) for found in numbers if found), default=0)
        return Heartbeat(number, marks.get(f"{number:04d}.sign", ""))

    def read(self, number: int) -> dict[str, Any]:
        """Return a launch's record and notes merged into one dict, which is empty if there are none."""
        names = [f"launches/{number:04d}.json", f"launches/{number:04d}.sign"]
        files = self.store.read_many(names)
        return {key: value for name in names if name in files for key, value in json.loads(files[name]).items()}

    def create(self, number: int, record: dict[str, Any]) -> bool:
        """Create the record of a launch if its number has never been used, and return whether it owns the number."""
        created = self.store.create(f"launches/{number:04d}.json", canonical_json(record))
        # if the reply to the winning request was lost and the request retried, even the winner gets False
        return created or bool(self.read(number).get("token") == record["token"])

    def beat(self, number: int, notes: dict[str, Any]) -> None:
        """Update a launch's heartbeat, and store the launch's notes with it."""
        self.store.write(f"launches/{number:04d}.sign", canonical_json({"time": time.time_ns(), **notes}))

    @abstractmethod
    def fence(self, number: int, token: str, seen: Seen) -> bool:
        """Fence off all launches before `number`, unless readers see checkpoints other than `seen.checkpoints`.

        Returns:
            Whether the checkpoints were as seen.
        """

    @abstractmethod
    def staging(self, number: int, token: str) -> Path:
        """Return the local folder to which only launch `number` writes. It is two levels below its run folder."""

    def is_unchanged(self, seen: Seen) -> bool:
        """Return whether readers still see the checkpoints that the launch saw."""
        return seen.checkpoints is None or dict(self.checkpoints()) == dict(seen.checkpoints)
