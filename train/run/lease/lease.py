"""The lease of a run: acquired by one launch at a time, renewed by heartbeats, and taken over when they stop.

To acquire the lease, a launch creates the record with the next number, which only one launch can do. The launch with
the highest number holds the lease. Other launches wait until its heartbeat has not changed for `takeover_after` seconds
on their own clock, so the clocks of different machines are never compared. A holder that was suspended between a check
and a write may wake up after it has been superseded. Therefore, acquiring the lease also fences off all earlier
launches, in a way that depends on the storage (`Backend.fence`).
"""

import threading
import time
import uuid
from pathlib import Path
from typing import Any

from shards.base.errors import Outage, RequestError, WorkError, say
from train.run.lease.backend import Backend, Heartbeat, Seen
from train.run.lease.owner import Pace, describe, has_ended, now, this_process


class RunInUse(RequestError):
    """Error raised if another launch holds the run's lease."""


class LeaseLost(RequestError):
    """Error raised if another launch has taken over the run from this launch."""


def wait_until_free(backend: Backend, ttl: float, dead: Heartbeat | None = None) -> Heartbeat:
    """Wait until the newest launch has ended, or has sent no heartbeat for `ttl` seconds.

    Args:
        dead: result of an earlier call. If the newest launch has sent no heartbeat since, this call does not wait.

    Raises:
        RunInUse: the newest launch is running, or another launch has started in the meantime.
    """
    first, deadline = backend.newest(), time.monotonic() + ttl
    while True:
        heartbeat = backend.newest()
        record = backend.read(heartbeat.number)
        if heartbeat.number == 0 or heartbeat == dead or has_ended(record):
            return heartbeat
        if heartbeat != first:
            raise RunInUse(
                f"{backend.place} is in use: {describe(heartbeat.number, record)} is training there, and only "
                f"one launch may use a run at a time. Wait until that launch ends, stop it, or choose a different "
                f"run_dir."
            )
        if time.monotonic() > deadline:
            return heartbeat
        time.sleep(min(backend.interval / 5, ttl / 10))


class Lease:
    """Exclusive ownership of a run. This is a context manager; while it is open, a thread sends heartbeats.

    A superseded owner loses its staging folder if the run is in a folder, and is ignored by readers if it is at a URL.
    """

    def __init__(self, backend: Backend, number: int, token: str, pace: Pace | None = None):
        self.backend, self.number = backend, number
        self.token = token
        """Random token, which differs from that of every other launch, even of a deleted run at the same location."""
        self.pace = pace
        """Pace of this launch, or of the previous launch until this launch has written a checkpoint; None: unknown."""
        self.notes: dict[str, Any] = {}
        self.superseded = False
        """Whether the last heartbeat found that another launch has taken over."""

    @classmethod
    def acquire(cls, backend: Backend, ttl: float, seen: Seen = Seen()) -> "Lease":  # noqa: B008 (immutable)
        """Acquire the lease of a run. If several launches try at the same time, only one succeeds.

        Args:
            ttl: seconds without a heartbeat after which the holder counts as dead.
            seen: the state of the run that this launch prepared for.

        Raises:
            RunInUse: another launch holds the run.
            WorkError: the checkpoints changed since `seen`.
        """
        token = uuid.uuid4().hex
        while True:
            free = wait_until_free(backend, ttl, seen.free)
            number, pace = free.number + 1, Pace.from_record(backend.read(free.number))
            record = this_process() | {"token": token} | (pace.to_record() if pace else {})
            if backend.create(number, record):
                break
        lease = cls(backend, number, token, pace)
        if not backend.fence(number, token, seen):
            lease.release()
            raise WorkError(
                f"The checkpoints of {backend.place} changed while this launch was starting: the previous launch was "
                f"still running. That launch has been superseded and can no longer change the run. Run the command "
                f"again to resume from the newest checkpoint."
            )
        return lease

    @property
    def folder(self) -> Path:
        """The launch's staging folder."""
        return self.backend.staging(self.number, self.token)

    @property
    def run_dir(self) -> Path:
        """Local folder in which this launch works: the run folder, or a local folder for a run at a URL."""
        return self.folder.parents[1]

    def check(self) -> None:
        """Check that no other launch has taken over.

        Raises:
            LeaseLost: another launch has taken over.
        """
        if self.backend.newest().number != self.number:
            raise self.taken_over()

    def renew(self) -> None:
        """Send a heartbeat.

        Raises:
            LeaseLost: another launch has taken over.
        """
        self.check()
        self.backend.beat(self.number, self.notes)

    def taken_over(self) -> LeaseLost:
        """Build the error for a launch that has been superseded."""
        newest = self.backend.newest().number
        return LeaseLost(
            f"{self.backend.place} is in use: {describe(newest, self.backend.read(newest))} took over from this "
            f"launch (launch {self.number}), which sent no heartbeat for longer than takeover_after. Nothing that this "
            f"launch has written since then is part of the run."
        )

    def note(self, pace: Pace) -> None:
        """Record the launch's pace for its successor. The next heartbeat stores it."""
        self.pace = pace
        self.notes = {**self.notes, **pace.to_record()}

    def release(self) -> None:
        """Record that this launch has ended, so that the next launch need not wait."""
        self.backend.beat(self.number, {**self.notes, "ended": now()})

    def __enter__(self) -> "Lease":
        self.leaving = threading.Event()
        self.thread = threading.Thread(target=self._send_heartbeats, name="lease", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.leaving.set()
        self.thread.join()
        try:
            self.check()
            self.release()
        except LeaseLost as lost:
            self.superseded = True
            if error is not None:  # errors are expected once the staging folder is gone
                raise lost from error
        except (OSError, Outage) as failure:  # the next launch waits until takeover_after has passed
            say(failure)

    def _send_heartbeats(self) -> None:
        while not self.leaving.wait(self.backend.interval):
            try:
                self.renew()
            except LeaseLost:
                self.superseded = True
                return
            except (OSError, Outage) as error:  # slow storage: other launches decide whether it was too slow
                print(f"{self.backend.place}: the heartbeat of launch {self.number} failed: {error}", flush=True)
