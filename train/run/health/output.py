"""What each rank prints, kept beside what people see: RUN/logs/0004/rank-00003.log, of launch 4."""

import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNHEARD = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""By the process that copies: a scheduler signals every process of a job, and the rank goes on printing."""
LAST_WORDS = 5.0
"""Seconds that a copy may take to end; what a rank started and left behind may hold it open."""


@contextmanager
def kept(folder: Path, rank: int, launches: int) -> Iterator[None]:
    """Copy what this process and its children print, and the error that ends it.

    What goes to a terminal is copied too, but for the main process's, where the bar is. The first process of a
    container copies nothing: its end is that of whoever copies, before the last words.

    Args:
        folder: of the launch, RUN/logs/0004.
        launches: how many launches' are kept, with this one; 0: none.
    """
    if launches == 0 or os.getpid() == 1:
        yield
        return
    path = folder / f"rank-{rank:05d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        for old in outdated(os.listdir(path.parents[1]), int(folder.name), launches):
            shutil.rmtree(path.parents[1] / old, ignore_errors=True)
    streams = [number for number in (1, 2) if rank or not os.isatty(number)]
    originals = {number: os.dup(number) for number in streams}
    copies: list[subprocess.Popen[bytes]] = []
    for number in streams:
        if copies and os.path.sameopenfile(originals[1], originals[2]):  # one copy keeps the order
            os.dup2(1, 2)
            continue
        copies.append(copy_to(path, originals[number]))
        _flush()
        os.dup2(copies[-1].stdin.fileno(), number)  # type: ignore[union-attr]
    try:
        yield
    except BaseException:
        # whoever reads the rank's log misses it, if it is said later; the folder may be gone, or the disk full
        with suppress(OSError), path.open("a") as file:
            traceback.print_exc(file=file)
        raise
    finally:
        _flush()
        for number, original in originals.items():
            os.dup2(original, number)
            os.close(original)
        for copy in copies:
            with suppress(subprocess.TimeoutExpired):
                copy.communicate(timeout=LAST_WORDS)


def outdated(names: Iterable[str], number: int, launches: int) -> list[str]:
    """Which launches' folders go, where `launches` are kept, of which `number` is the newest."""
    return [name for name in names if name.isdecimal() and int(name) <= number - launches]


def copy_to(path: Path, stream: int) -> subprocess.Popen[bytes]:
    """A process that appends what it gets to `path`, and hands it on to `stream`.

    It outlives this one until all is written, however this one ends.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)
    try:
        return subprocess.Popen(["tee", "-a", path], stdin=subprocess.PIPE, stdout=stream, stderr=stream)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
