"""The process that owns a lease, and whether it is known to have ended."""

import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple


class Pace(NamedTuple):
    """Durations of the last checkpoint and of a step, in seconds."""

    save: float
    step: float

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Pace | None":
        """Read the pace from a launch's record; None: the launch wrote no checkpoint."""
        return cls(record["save_seconds"], record.get("step_seconds", 0.0)) if "save_seconds" in record else None

    def to_record(self) -> dict[str, float]:
        """Return this pace as fields of a record, for `from_record`."""
        return {"save_seconds": self.save, "step_seconds": self.step}


def this_process() -> dict[str, Any]:
    """Return a record that describes this process, for messages and for other launches."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "began": now(),
        "machine": machine(),
        "process": process_start(os.getpid()),
    }


def describe(number: int, record: dict[str, Any]) -> str:
    """Describe a launch for messages: its number, host, process, job and start time."""
    if not record:
        return f"launch {number}, whose record is not written yet,"
    job = f", job {record['job']}" if record["job"] else ""
    return f"launch {number} (host {record['host']}, process {record['pid']}{job}, since {record['began']})"


def has_ended(record: dict[str, Any]) -> bool:
    """Return whether a launch is known to have ended: its record says so, or its process on this machine is gone."""
    if "ended" in record:
        return True
    if not record or machine() is None or machine() != record["machine"]:
        return False
    # process ids are reused, so the start time must match as well
    return record["pid"] == os.getpid() or process_start(record["pid"]) != record["process"]


def now() -> str:
    """Return the current time in UTC, for messages."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine() -> str | None:
    """Return the scope in which process IDs are unique: host, boot and PID namespace. None: there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def process_start(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks since boot; None: it does not exist, or is a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(fields[18])
