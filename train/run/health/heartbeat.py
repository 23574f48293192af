"""What each rank of a run is at, told to all: where a collective fails, it is known who did not come to it.

A thread of each rank puts its beat into the store in which the process group meets, so machines need to share no
folder. The loop only notes what it is at; it waits for nothing.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from train.data.watchdog import diagnose

BEAT = 2.0
"""Seconds between signs of life."""
SILENT = 2.5 * BEAT
"""A rank that gave none in so many seconds gives none."""
NAMED = 4
"""How many ranks a message names."""
STARTING, FAILED, LEFT = "starting", "failed: ", "left, as others were missing"


class Beat(NamedTuple):
    """A rank's sign of life. Times are of its machine's clock."""

    rank: int
    host: str
    pid: int
    step: int
    """That it has done."""
    at: str
    """`loading`, `training`, …; or `failed: ` and why."""
    passed: int
    """How many things it has been at: all ranks are at the same, in the same order."""
    began: float
    """When it began what it is at."""
    told: float
    """When it said so."""
    loading: float = 0.0
    """Seconds that it has waited for batches, in all."""

    @property
    def name(self) -> str:
        """The rank, for people."""
        return f"rank {self.rank} (host {self.host}, process {self.pid})"

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"after step {self.step}, {self.at}"


class Missing(NamedTuple):
    """Whom the others wait for."""

    ranks: Collection[int]
    words: str


def who_is_missing(beats: Sequence[Beat | None], silent: Collection[int], now: float) -> Missing:
    """The ranks that never came, that failed, or that give no sign of life; or else those that are behind.

    Args:
        beats: of each rank its last one; None: it never gave one.
        silent: ranks that give none any more.
        now: the time.
    """
    known = [beat for beat in beats if beat is not None]
    said = {rank: f"rank {rank} never came" for rank, beat in enumerate(beats) if beat is None}
    for beat in known:
        if beat.at.startswith(FAILED):
            said[beat.rank] = f"{beat.name} ended after step {beat.step}: {beat.at.removeprefix(FAILED)}"
        elif beat.rank in silent and beat.at != LEFT:
            said[beat.rank] = (
                f"{beat.name} has given no sign of life for {max(0.0, now - beat.told):.0f} s; it was {beat.place}"
            )
    if not said:
        least = min(beat.passed for beat in known)
        behind = [beat for beat in known if beat.passed == least]
        if len(behind) == len(known):
            longest = now - min(beat.began for beat in known)
            place = f"{known[0].place}, for up to {longest:.0f} s"
            return Missing((), f"all {len(known)} ranks live, and are {place}: a device or the network is stuck")
        said = {beat.rank: f"{beat.name} is {beat.place}, since {max(0.0, now - beat.began):.0f} s" for beat in behind}
    more = f" and {len(said) - NAMED} more" if len(said) > NAMED else ""
    waiting = [beat for beat in known if beat.rank not in said]
    others = f"; the others are {max(waiting, key=lambda beat: beat.passed).place}" if waiting else ""
    return Missing(set(said), "; ".join(list(said.values())[:NAMED]) + more + others)


class HeartbeatReporter:
    """This rank's. It beats from `start` until `close`."""

    def __init__(self, rank: int = 0, size: int = 1, store: dist.Store | None = None, limit: float = 600.0):
        """`store`: of the process group, without which there are no others; `limit`: seconds of a collective."""
        self.store, self.size, self.limit = store, size, limit
        now = time.time()
        self.beat = Beat(rank, socket.gethostname(), os.getpid(), 0, STARTING, 0, now, now)
        self.warned = -1
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")

    def start(self) -> "HeartbeatReporter":
        """Begin to beat, where there are others."""
        if self.store is not None:
            self.thread.start()
        return self

    def close(self) -> None:
        """Beat no more."""
        self.stopped.set()
        if self.thread.is_alive():
            self.thread.join(BEAT)  # a process must not end while it is in the middle of torch's code

    def at(self, step: int, what: str) -> None:
        """Note what this rank is at, after so many steps; all ranks note the same, one after the other."""
        beat, now = self.beat, time.time()
        loading = beat.loading + (now - beat.began if beat.at == "loading" else 0.0)
        self.beat = beat._replace(step=step, at=what, passed=beat.passed + 1, began=now, loading=loading)

    def fail(self, error: BaseException | None) -> None:
        """Tell the others why this rank ends; None: others are missing."""
        lines = str(error).splitlines() or [""]
        why = LEFT if error is None else f"{FAILED}{type(error).__name__}: {lines[0][:200]}"
        self.beat = self.beat._replace(at=why)
        if self.store is not None:
            diagnose(self._tell)

    def everyone(self) -> list[Beat | None]:
        """Each rank's last beat.

        Raises:
            RuntimeError: torch's, where the store is gone.
        """
        if self.store is None:
            return [self.beat._replace(told=time.time())]
        keys = [f"beat/{rank}" for rank in range(self.size)]
        there = keys if self.store.check(keys) else [key for key in keys if self.store.check([key])]
        found = dict(zip(there, self.store.multi_get(there), strict=True))
        return [Beat(**json.loads(found[key])) if key in found else None for key in keys]

    def missing(self) -> Missing | None:
        """Whom the others wait for; None where the store says nothing. Takes some seconds."""
        found: list[Missing] = []

        def look() -> str:
            try:
                before = self.everyone()
                time.sleep(SILENT)
                beats = self.everyone()
            except RuntimeError as error:
                return str(error)
            silent = {beat.rank for beat, old in zip(beats, before, strict=True) if beat and old and beat == old}
            found.append(who_is_missing(beats, silent - {self.beat.rank}, time.time()))
            return ""

        diagnose(look)
        return found[0] if found else None

    def explained(self) -> str:
        """Whom the others wait for, as a sentence."""
        if self.store is None:
            return ""
        missing = self.missing()
        if missing is None:
            where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            return (
                f"The store at {where}, which knows what each rank is at, does not answer either: look at that machine,"
                f" rank 0's. "
            )
        return f"{missing.words[0].upper()}{missing.words[1:]}. "

    def _tell(self) -> str:
        """Put the beat into the store; empty: it is gone, and the next collective will say so."""
        assert self.store is not None
        beat: dict[str, Any] = self.beat._replace(told=time.time())._asdict()
        try:
            self.store.set(f"beat/{self.beat.rank}", json.dumps(beat))
        except RuntimeError:
            return ""
        return "told"

    def _beat(self) -> None:
        while not self.stopped.is_set() and self._tell():
            if time.time() - self.beat.began > self.limit / 2 and self.warned != self.beat.passed:
                self.warned = self.beat.passed
                threading.Thread(target=self._warn, daemon=True).start()  # this one beats on
            self.stopped.wait(BEAT)

    def _warn(self) -> None:
        """Say whom the others wait for, before the time is over: NCCL ends the process by itself, without a word."""
        missing = self.missing()
        if missing and min(set(range(self.size)) - set(missing.ranks), default=-1) == self.beat.rank:
            print(f"warning: {missing.words}. After {self.limit:g} s the run ends.", flush=True)
