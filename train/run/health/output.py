"""Copies of each rank's output: RUN/logs/0004/rank-00003.log holds the output of rank 3 in launch 4."""

import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

BLOCKED_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are blocked in `tee`. A scheduler signals every process of a job, but the rank still prints later."""
DRAIN_SECONDS = 5.0
"""Seconds to wait for `tee` to finish. A child process that outlives the rank may keep the input of `tee` open."""


@contextmanager
def tee_output(folder: Path, rank: int, num_launches: int) -> Iterator[None]:
    """Copy the output of this process and its children to a file, as well as the traceback of an error in the body.

    Output to a terminal is copied too, except that of rank 0, which contains the progress bar. If this is the first
    process in a container, nothing is copied, because the container would end before `tee` could finish.

    Args:
        folder: folder of the launch's logs, such as RUN/logs/0004.
        num_launches: number of launches whose logs are kept, including this launch. 0: nothing is copied.
    """
    if num_launches == 0 or os.getpid() == 1:
        yield
        return
    path = folder / f"rank-{rank:05d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        for name in outdated(os.listdir(path.parents[1]), int(folder.name), num_launches):
            shutil.rmtree(path.parents[1] / name, ignore_errors=True)
    streams = [number for number in (1, 2) if rank or not os.isatty(number)]
    originals = {number: os.dup(number) for number in streams}
    tees: list[subprocess.Popen[bytes]] = []
    for number in streams:
        if tees and os.path.sameopenfile(originals[1], originals[2]):  # a shared tee keeps the output in order
            os.dup2(1, 2)
            continue
        tees.append(start_tee(path, originals[number]))
        _flush()
        os.dup2(tees[-1].stdin.fileno(), number)  # type: ignore[union-attr]
    try:
        yield
    except BaseException:
        # written here, because Python prints the traceback only after the copying has ended; the folder may be gone or
        # the disk full
        with suppress(OSError), path.open("a") as file:
            traceback.print_exc(file=file)
        raise
    finally:
        _flush()
        for number, original in originals.items():
            os.dup2(original, number)
            os.close(original)
        for tee in tees:
            with suppress(subprocess.TimeoutExpired):
                tee.communicate(timeout=DRAIN_SECONDS)


def outdated(names: Iterable[str], newest: int, num_launches: int) -> list[str]:
    """Return the log folders to delete.

    Args:
        names: names in RUN/logs. Names that are not the number of a launch are ignored.
        newest: number of the newest launch.
        num_launches: number of launches whose logs are kept.
    """
    return [name for name in names if name.isdecimal() and int(name) <= newest - num_launches]


def start_tee(path: Path, stream: int) -> subprocess.Popen[bytes]:
    """Start a process that appends its input to `path` and copies it to the file descriptor `stream`.

    `tee` continues until it has written everything, no matter how this process ends.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        return subprocess.Popen(["tee", "-a", path], stdin=subprocess.PIPE, stdout=stream, stderr=stream)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
