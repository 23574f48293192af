"""Private folders of attempts on this machine's disk. Whose owner died is known by its lock, and they are swept."""

import atexit
import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shards.base.durable import locked
from shards.base.store import Store

OWNER = ".owner"
SWEEPER = ".sweeper.lock"


@contextmanager
def attempt_folder(store: Store, tar: str) -> Iterator[Path]:
    """A private local folder for one attempt at `tar`; gone afterwards, however the attempt ended.

    What attempts that were killed left behind for this tar (on this machine, where the root is on an object store) is
    removed first.
    """
    attempts = store.attempts()
    folder = attempts / f"{tar}.{uuid.uuid4().hex[:12]}"
    with ExitStack() as ours:
        with locked(_sweeper(attempts, tar)):  # nobody sweeps a folder before it is owned
            _sweep(attempts.glob(f"{tar}.*"))
            ours.callback(shutil.rmtree, folder, ignore_errors=True)
            ours.enter_context(locked(folder / OWNER))
        yield folder


def sweep_attempts(store: Store) -> None:
    """Remove what dead attempts left behind on this machine.

    The next attempt at a tar does it for that tar; but there is none after one that was killed when it had committed,
    or when the job was told to leave.
    """
    attempts = store.attempts()
    for tar in {folder.name.rpartition(".")[0] for folder in attempts.glob("*.*")}:
        with locked(_sweeper(attempts, tar)):
            _sweep(attempts.glob(f"{tar}.*"))


def use_scratch(scratch: Path | None) -> Path:
    """Have all temporaries of this process, and of its children, in a folder of its own below `scratch`, or below the
    system's temporary folder; returns it.

    What processes that are gone left there, of whichever job, is removed first. It goes when this process ends; killed,
    it cannot see to that, and the next one does.
    """
    top = _scratch(scratch)
    folder = top / f"{os.getpid()}.{uuid.uuid4().hex[:12]}"
    with locked(top / SWEEPER):
        _sweep(top.glob("*.*"))
        lives = ExitStack()
        lives.callback(shutil.rmtree, folder, ignore_errors=True)
        lives.enter_context(locked(folder / OWNER))
    atexit.register(lives.close)
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    return folder


def sweep_scratch(scratch: Path | None) -> None:
    """Remove what processes that are gone left below `scratch` on this machine."""
    top = _scratch(scratch)
    if top.is_dir():
        with locked(top / SWEEPER):
            _sweep(top.glob("*.*"))


def _scratch(scratch: Path | None) -> Path:
    return (scratch or Path(tempfile.gettempdir())) / f"latentmill-{os.getuid()}.scratch"


def _sweeper(attempts: Path, tar: str) -> Path:
    return attempts.with_name(f"{attempts.name}.locks") / f"{tar}.lock"


def _sweep(folders: Iterable[Path]) -> None:
    for folder in folders:
        try:
            with (folder / OWNER).open("a") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except (FileNotFoundError, NotADirectoryError):
            continue  # its owner has just removed it
        except BlockingIOError:
            continue  # its owner is at work
