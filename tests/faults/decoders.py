"""Replacements for `pixels.decode` that some pictures kill; a child process imports them by name."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from precompute.input.reject import Reject
from precompute.pixels.decode import LimitsConfig, Picture, PixelsConfig, decode
from shards.format.buckets import Bucket

ACCEPTED = "accepted"


def poisoned(data: bytes, *args: Any) -> Picture:
    """Decode like `pixels.decode`, except that a picture that begins with such a word dies, loops, sleeps or hoards
    memory."""
    if data.startswith(b"ABORT"):
        os.abort()
    if data.startswith(b"SEGFAULT"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if data.startswith(b"KILLED"):  # like the kernel when memory runs out
        os.kill(os.getpid(), signal.SIGKILL)
    while data.startswith(b"LOOP"):
        pass
    if data.startswith(b"SLEEP"):
        time.sleep(1e6)
    if data.startswith(b"NAP"):
        time.sleep(4)
    if data.startswith(b"MEMORY"):
        hoard = [bytes(1 << 28) for _ in range(1000)]
        assert not hoard
    if data.startswith(b"EXIT"):
        os._exit(3)
    return decode(data, *args)


def killed_once(data: bytes, *args: Any) -> Picture:
    """Die on the first call for a picture that begins with a file name, and decode the rest of it on the second."""
    if data.startswith(b"/"):
        name, data = data.split(b"\n", 1)
        if not (path := Path(name.decode())).exists():
            path.touch()
            os.abort()
    return decode(data, *args)


def reject_in_child(data: bytes, *args: Any) -> Picture:
    """Decode like `pixels.decode`, except that a child process rejects every picture."""
    if Path(sys.argv[0]).name == "isolation.py":
        raise Reject("in_child", "decoded in a child process")
    return decode(data, *args)


def imported() -> list[str]:
    """Return the names of all imported modules."""
    return list(sys.modules)


def outcome_and_memory(data: bytes, limits: LimitsConfig) -> tuple[str, int]:
    """Return the outcome for a picture, and this process's peak memory in bytes."""
    try:
        decode(data, [Bucket(64, 64)], PixelsConfig(), limits)
        outcome = ACCEPTED
    except Reject as reject:
        outcome = reject.reason
    # getrusage includes memory from before exec
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return outcome, int(peak.split()[1]) << 10
