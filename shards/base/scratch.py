"""Private folders of attempts, and of processes, for files that nobody else needs.

    .attempts/00042.<random>/.owner         host, machine and boot of the owner, as JSON; locked while the owner lives

A killed owner cannot remove its folder, so the next process on the same machine does: there the kernel's lock says
whether the owner is alive. Other machines leave the folder alone, because a lock may be visible on one machine only
(Lustre with `localflock`, many NFS mounts). What a machine never came back for is left to `python -m shards clean`.
"""

import atexit
import json
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shards.base.durable import flock, locked
from shards.base.store import Store

OWNER = ".owner"
NEW = ".new"
"""Suffix of a folder whose owner is not yet written down."""
SWEEPER = ".sweeper.lock"


@contextmanager
def attempt_folder(store: Store, tar: str) -> Iterator[Path]:
    """A private local folder for one attempt at `tar`; gone afterwards, however the attempt ended.

    What killed attempts at this tar on this machine left behind is removed first.

    Raises:
        RequestError: the file system does not support file locks.
    """
    attempts = store.attempts()
    with ExitStack() as ours:
        with locked(_sweeper(attempts, tar)):
            _sweep(attempts.glob(f"{tar}.*"))
            folder = _make_owned(attempts / f"{tar}.{uuid.uuid4().hex[:12]}", ours)
        yield folder


def sweep_attempts(store: Store) -> None:
    """Remove what killed attempts left behind on this machine.

    The next attempt at a tar does it for that tar; but there is none after one that was killed when it had committed,
    or when the job was told to leave.
    """
    attempts = store.attempts()
    for tar in {folder.name.removesuffix(NEW).rpartition(".")[0] for folder in attempts.glob("*.*")}:
        with locked(_sweeper(attempts, tar)):
            _sweep(attempts.glob(f"{tar}.*"))


def use_scratch(scratch: Path | None) -> Path:
    """Have all temporaries of this process, and of its children, in a folder of its own below `scratch`, or below the
    system's temporary folder; returns it.

    What processes of this machine that are gone left there, of whichever job, is removed first. The folder goes when
    this process ends; if this process is killed, the next one removes it.

    Raises:
        RequestError: the file system does not support file locks.
    """
    lives = ExitStack()
    folder = _make_private(_scratch(scratch), lives)
    atexit.register(lives.close)
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    return folder


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a private folder in the system's temporary folder, and remove it afterwards.

    What killed processes on this machine left there is removed first.

    Raises:
        RequestError: the file system does not support file locks.
    """
    with ExitStack() as ours:
        yield _make_private(_scratch(None), ours)


def sweep_scratch(scratch: Path | None) -> None:
    """Remove what processes that are gone left below `scratch` on this machine."""
    top = _scratch(scratch)
    if top.is_dir():
        with locked(top / SWEEPER):
            _sweep(top.glob("*.*"))


def is_held(folder: Path) -> bool:
    """Whether a process on this machine owns the folder and is alive. Owners on other machines may not be visible."""
    try:
        with (folder / OWNER).open("r+b") as owner:
            flock(owner.fileno(), folder / OWNER, wait=False)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    return False


def _scratch(scratch: Path | None) -> Path:
    return (scratch or Path(tempfile.gettempdir())) / f"latentmill-{os.getuid()}.scratch"


def _make_private(top: Path, lives: ExitStack) -> Path:
    """Create a folder below `top` that this process owns, after removing those of dead processes."""
    with locked(top / SWEEPER):
        _sweep(top.glob("*.*"))
        return _make_owned(top / f"{os.getpid()}.{uuid.uuid4().hex[:12]}", lives)


def _sweeper(attempts: Path, tar: str) -> Path:
    return attempts.with_name(f"{attempts.name}.locks") / f"{tar}.lock"


def _make_owned(folder: Path, lives: ExitStack) -> Path:
    """Create a folder that never exists without its owner; closing `lives` removes it and releases its lock."""
    new = folder.with_name(folder.name + NEW)
    while True:
        with ExitStack() as made:
            made.callback(shutil.rmtree, new, ignore_errors=True)
            made.callback(shutil.rmtree, folder, ignore_errors=True)
            try:
                owner = made.enter_context(locked(new / OWNER))
                owner.write(json.dumps(_this_machine()).encode())
                owner.flush()
                new.rename(folder)
            except FileNotFoundError:
                continue  # another machine took it for abandoned
            lives.push(made.pop_all())
            return folder


def _this_machine() -> dict[str, str]:
    return {
        "host": socket.gethostname(),
        "machine": _first_line("/etc/machine-id"),
        "boot": _first_line("/proc/sys/kernel/random/boot_id"),
    }


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""  # containers often have no machine-id; other systems have neither


def _is_ours(folder: Path) -> bool:
    """Whether this machine made the folder, in this boot or an earlier one; or nobody has finished making it."""
    try:
        data = (folder / OWNER).read_bytes()
    except FileNotFoundError:
        data = b""
    try:
        owner = json.loads(data)
    except ValueError:
        return folder.suffix == NEW
    ours = _this_machine()
    same_boot = owner.get("boot") == ours["boot"] != ""
    # several machines may share one host name (localhost), and images that were cloned share a machine-id
    same_machine = all(owner.get(name) == ours[name] for name in ("host", "machine"))
    return same_boot or same_machine


def _sweep(folders: Iterable[Path]) -> None:
    for folder in folders:
        try:
            if not _is_ours(folder) or is_held(folder):
                continue
            shutil.rmtree(folder, ignore_errors=True)
        except NotADirectoryError:
            continue
