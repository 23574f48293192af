"""Which launch holds a run folder: one at a time; and nothing of an older one, should it wake, is ever seen.

launches/0004/              made by the launch that takes the run, and gone when the next one takes it over
             /launch.json   who it is; this file's time of change is its sign of life
launches/0003.json          who held the run before

A launch changes the run by renames from its own folder and into it, and by nothing else. One that slept while another
took over has no such folder any more, and the kernel refuses its renames. (It could sleep between a check and a rename;
a lock on a file would say nothing of other machines.)
"""

import json
import os
import shutil
import socket
import threading
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shards.base.durable import fsync_folder, make_folder, write_file
from shards.base.errors import Outage, RequestError, say

BEAT = 1.0
"""Seconds between signs of life."""
RECORD = "launch.json"
TRACKER_ID = "tracker.json"
"""File of the run folder: what the run is called in its tracker."""
BEATS_AWAY = 5
"""Signs of life here to one at the run's address."""


class Sign(NamedTuple):
    """The newest launch, and its last sign of life."""

    number: int = 0
    changed: int = 0
    """In ns, by the file system's clock; 0: there was none yet."""


def launch_folder(run_dir: Path, number: int) -> Path:
    """What the launch of this number alone may write to."""
    return run_dir / "launches" / f"{number:04d}"


def newest_sign(run_dir: Path) -> Sign:
    """Of the launch that took the run last, alive or not; `Sign()`: there was none."""
    number = max((int(path.name) for path in (run_dir / "launches").glob("[0-9]*") if path.is_dir()), default=0)
    try:
        return Sign(number, (launch_folder(run_dir, number) / RECORD).stat().st_mtime_ns)
    except FileNotFoundError:
        return Sign(number)


def read_record(run_dir: Path, number: int) -> dict[str, Any]:
    """Who a launch is; empty: it has not said."""
    try:
        record: dict[str, Any] = json.loads((launch_folder(run_dir, number) / RECORD).read_bytes())
    except FileNotFoundError:
        return {}
    return record


def wait_until_free(run_dir: Path, patience: float, dead: Sign | None = None) -> Sign:
    """Wait until the newest launch has ended, died on this machine, or gave no sign of life for `patience` seconds.

    Args:
        dead: what an earlier wait returned.

    Raises:
        RequestError: it is alive, or another one began meanwhile.
    """
    first, deadline = newest_sign(run_dir), time.monotonic() + patience
    while True:
        sign = newest_sign(run_dir)
        record = read_record(run_dir, sign.number)
        if sign in (Sign(), dead) or is_over(record):
            return sign
        if sign != first:
            raise RequestError(
                f"{run_dir} is in use: {described(sign.number, record)} trains in it, and one launch at a time may. "
                f"Wait for its end, stop it, or give another run_dir."
            )
        if time.monotonic() > deadline:
            return sign
        time.sleep(0.1)


def take(run_dir: Path, patience: float, dead: Sign | None = None) -> Path:
    """Take the run over; returns the launch's own folder, `launches/0004`. Of several at once, one does.

    Raises:
        RequestError: another launch holds the run.
    """
    make_folder(run_dir / "launches")
    while True:
        before = wait_until_free(run_dir, patience, dead)
        folder = launch_folder(run_dir, before.number + 1)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        if newest_sign(run_dir).number == before.number + 1:
            break
        folder.rmdir()  # the number was another's, who has been superseded since
    write_record(folder, who_is_this())
    for older in folder.parent.glob("[0-9]*"):
        if older.is_dir() and int(older.name) < before.number + 1:
            take_away(older, folder)
    fsync_folder(folder.parent)
    return folder


def take_away(older: Path, folder: Path) -> None:
    """From here on nothing of an older launch reaches the run; its record stays, as launches/0003.json."""
    gone = folder / older.name
    with suppress(FileNotFoundError):  # a launch that was superseded itself, between taking and this
        older.rename(gone)
    with suppress(FileNotFoundError):  # it was killed before it said who it is
        (gone / RECORD).rename(older.with_suffix(".json"))
    shutil.rmtree(gone, ignore_errors=True)  # what its owner still holds open may stay; it is in nobody's way here


def who_is_this() -> dict[str, Any]:
    """This process, for people and for other launches."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "began": now(),
        "machine": machine(),
        "process": process_start(os.getpid()),
    }


def now() -> str:
    """The time, for people."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def described(number: int, record: dict[str, Any]) -> str:
    """A launch, for people."""
    if not record:
        return f"launch {number}, which has not said yet who it is,"
    job = f", job {record['job']}" if record["job"] else ""
    return f"launch {number} (host {record['host']}, process {record['pid']}{job}, since {record['began']})"


def is_over(record: dict[str, Any]) -> bool:
    """Whether a launch is known to have ended: it said so, or its process of this machine is gone, or begins anew."""
    if "ended" in record:
        return True
    if not record or machine() is None or machine() != record["machine"]:
        return False
    # the number may be another process's by now
    return record["pid"] == os.getpid() or process_start(record["pid"]) != record["process"]


def machine() -> str | None:
    """What process ids are unique in: host, boot and namespace. None: not known here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def process_start(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None: there is none, or it is dead and not yet reaped."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(fields[18])


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Whole or not at all; never makes the folder, which may have been taken away."""
    write_file(folder / f".{RECORD}", json.dumps(record, indent=2).encode()).replace(folder / RECORD)


class Pace(NamedTuple):
    """Seconds of what leaving consists of."""

    save: float
    """Until a checkpoint was written."""
    step: float


def last_pace(run_dir: Path) -> Pace | None:
    """Of the newest of the earlier launches that wrote a checkpoint; None: not known."""
    records = [json.loads(path.read_bytes()) for path in sorted((run_dir / "launches").glob("*.json"))]
    return next((found for record in reversed(records) if (found := pace_of(record))), None)


def pace_of(record: dict[str, Any]) -> Pace | None:
    """What a launch has noted of itself."""
    return Pace(record["save_seconds"], record.get("step_seconds", 0.0)) if "save_seconds" in record else None


class Elsewhere(Protocol):
    """The address at which a run lies whose launch works in a folder of this machine."""

    def sign(self, **fields: Any) -> None: ...

    def check(self) -> None: ...

    def share(self, work: Path) -> None: ...


class Launch:
    """This launch, which has taken the run. A context manager: it gives signs of life while it is open."""

    def __init__(self, folder: Path, main: bool = True, away: Elsewhere | None = None):
        """`folder`: what `take` returned. Every process of the launch has one; the `main` one's gives the signs."""
        self.folder, self.run_dir, self.main, self.away = folder, folder.parents[1], main, away
        self.pace = last_pace(self.run_dir)
        """Of the newest checkpoint, of this launch or of one before; None: not known."""
        self.superseded = False
        """Whether another has taken over, as far as the last sign of life found."""
        self.left = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="launch", daemon=True)

    def __enter__(self) -> "Launch":
        if self.main:
            self.thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not self.main:
            return
        self.left.set()
        self.thread.join()
        if self.away is not None and not self.superseded:
            self._leave_address(self.away)
        if not self.folder.is_dir():
            if error is not None:
                raise superseded(self.folder) from error
        else:
            with suppress(FileNotFoundError):  # another took over just now
                self.note(ended=now())

    def _leave_address(self, away: Elsewhere) -> None:
        try:
            away.share(self.run_dir)
            away.sign(ended=now())
        except (RequestError, OSError, Outage) as error:  # all that the run goes on from is there
            say(error)

    def note(self, **fields: Any) -> None:
        """Add to this launch's record.

        Raises:
            FileNotFoundError: another launch has taken over.
        """
        record = read_record(self.run_dir, int(self.folder.name)) | fields
        self.pace = pace_of(record) or self.pace
        write_record(self.folder, record)

    def _beat(self) -> None:
        for beat in count(1):
            if self.left.wait(BEAT):
                return
            try:
                os.utime(self.folder / RECORD)
                if self.away is not None and beat % BEATS_AWAY == 0:
                    self.away.check()
                    self.away.sign()
            except (FileNotFoundError, RequestError):
                self.superseded = True
                return
            except (OSError, Outage) as error:  # slow storage: others decide whether it was too slow
                print(f"{self.folder / RECORD}: {error}", flush=True)

    def taken_over(self) -> RequestError:
        """That another launch has taken over, for people."""
        if self.away is not None and self.folder.is_dir():
            try:
                self.away.check()
            except RequestError as error:
                return error
        return superseded(self.folder)


def superseded(folder: Path) -> RequestError:
    """That another launch took the run from the one whose folder this was."""
    run_dir, number = folder.parents[1], newest_sign(folder.parents[1]).number
    return RequestError(
        f"{run_dir} is in use: {described(number, read_record(run_dir, number))} took it over from this launch, "
        f"{int(folder.name)}, which gave no sign of life for longer than takeover_after. Nothing that this one did "
        f"since is in the run."
    )


def publish(source: Path, target: Path, folder: Path) -> None:
    """Give what lies in the launch's own `folder` its name in the run, durably, in place of what has that name.

    Raises:
        FileNotFoundError: another launch has taken over.
    """
    remove(target, folder)
    source.replace(target)
    fsync_folder(target.parent)


def remove(path: Path, folder: Path) -> None:
    """Remove a folder of the run, at one moment; nothing happens where there is none.

    Raises:
        FileNotFoundError: another launch has taken over.
    """
    if path.is_dir():
        gone = folder / f"{path.name}.{uuid.uuid4().hex[:8]}"
        path.replace(gone)
        shutil.rmtree(gone)
