"""Private folders of attempts on this machine's disk. Whose owner died is known by its lock, and they are swept."""

import fcntl
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shards.base.durable import locked
from shards.base.store import Store

OWNER = ".owner"


@contextmanager
def attempt_folder(store: Store, tar: str, scratch: Path | None = None) -> Iterator[Path]:
    """A private local folder for one attempt at `tar`; gone afterwards, however the attempt ended.

    What attempts that were killed left behind for this tar (on this machine, where the root is on an object store) is
    removed first. `scratch` is where such a root's attempts are made; the temporary folder if not given.
    """
    attempts = store.attempts(scratch)
    folder = attempts / f"{tar}.{uuid.uuid4().hex[:12]}"
    with ExitStack() as ours:
        with locked(_sweeper(attempts, tar)):  # nobody sweeps a folder before it is owned
            _sweep(attempts, tar)
            ours.callback(shutil.rmtree, folder, ignore_errors=True)
            ours.enter_context(locked(folder / OWNER))
        yield folder


def sweep_attempts(store: Store, scratch: Path | None = None) -> None:
    """Remove what dead attempts left behind on this machine.

    The next attempt at a tar does it for that tar; but there is none after one that was killed when it had committed,
    or when the job was told to leave.
    """
    attempts = store.attempts(scratch)
    for tar in {folder.name.rpartition(".")[0] for folder in attempts.glob("*.*")}:
        with locked(_sweeper(attempts, tar)):
            _sweep(attempts, tar)


def _sweeper(attempts: Path, tar: str) -> Path:
    return attempts.with_name(f"{attempts.name}.locks") / f"{tar}.lock"


def _sweep(attempts: Path, tar: str) -> None:
    for folder in attempts.glob(f"{tar}.*"):
        try:
            with (folder / OWNER).open("a") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            continue  # its owner has just removed it
        except BlockingIOError:
            continue  # its owner is at work
