"""Private temporary folders for attempts and processes, with cleanup after killed owners.

    .attempts/00042.<random>/.owner     host, machine and boot ID of the owner, as JSON; locked while the owner lives

A killed owner cannot remove its folder, so the next process on the same machine does so, after checking with the file
lock that the owner is dead. Other machines leave the folder alone, because a lock may be visible only on the machine
that took it (Lustre with `localflock`, many NFS mounts). `python -m shards clean` removes folders left by machines that
never come back.
"""

import atexit
import glob
import json
import os
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shards.base.durable import flock, locked
from shards.base.errors import RequestError
from shards.base.store import Store

OWNER = ".owner"
NEW = ".new"
"""Suffix of a folder whose owner has not been recorded yet, or that is being removed."""
SWEEPER = ".sweeper.lock"
SCRATCH = ".scratch"
"""Ending of the folder for processes' private folders."""


@contextmanager
def attempt_folder(store: Store, tar: str) -> Iterator[Path]:
    """Yield a private local folder for one attempt at `tar`, and remove it afterwards, whatever the outcome.

    Folders left by killed attempts at this tar on this machine are removed first. Raises RequestError if the file
    system does not support file locks.
    """
    attempts = store.attempts()
    with ExitStack() as owned:
        with locked(_sweep_lock(attempts, tar)):
            _sweep(attempts.glob(f"{glob.escape(tar)}.*"))
            folder = _make_owned(attempts / f"{tar}.{uuid.uuid4().hex[:12]}", owned)
        yield folder


def sweep_attempts(store: Store) -> None:
    """Remove the folders that killed attempts left on this machine.

    Attempts do not sweep all of these folders: an attempt sweeps only the folders of its own tar, and a tar gets no
    further attempt if the last one was killed after its commit or while the job was stopping.
    """
    attempts = store.attempts()
    for tar in {folder.name.removesuffix(NEW).rpartition(".")[0] for folder in attempts.glob("*.*")}:
        with locked(_sweep_lock(attempts, tar)):
            _sweep(attempts.glob(f"{glob.escape(tar)}.*"))


def sweep(store: Store, scratch: Path | None) -> None:
    """At the end of a job, remove what dead processes left on this machine: the folders of attempts, and private
    folders below `scratch`. If they cannot be removed, print a warning, because the job's own result matters more."""
    try:
        sweep_attempts(store)
        sweep_scratch(scratch)
    except (RequestError, OSError) as error:
        print(f"warning: temporary folders of killed processes remain: {error}", file=sys.stderr, flush=True)


def use_scratch(scratch: Path | None) -> Path:
    """Direct all temporary files of this process and its children to a private folder, and return that folder.

    The folder is created below `scratch` (default: the system's temporary folder), after sweeping the folders that dead
    processes of any job left on this machine. It is removed when this process exits, or by the next process if this one
    is killed. Raises RequestError if the file system does not support file locks, or if the folder belongs to another
    user.
    """
    owned = ExitStack()
    folder = _make_private(_scratch(scratch), owned)
    atexit.register(owned.close)
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    return folder


@contextmanager
def private_folder() -> Iterator[Path]:
    """Yield a private folder in the system's temporary folder, and remove it afterwards.

    Folders left by killed processes on this machine are removed first. Raises RequestError if the file system does not
    support file locks, or if the system's folder for them belongs to another user.
    """
    with ExitStack() as owned:
        yield _make_private(_scratch(None), owned)


def sweep_scratch(scratch: Path | None) -> None:
    """Remove the folders that dead processes left below `scratch` on this machine."""
    top = _scratch(scratch)
    if top.is_dir():
        with locked(top / SWEEPER):
            _sweep(top.glob("*.*"))


def has_live_owner(folder: Path) -> bool:
    """Return whether a live process on this machine owns the folder. Owners on other machines may not be visible."""
    try:
        with (folder / OWNER).open("r+b") as owner:
            flock(owner.fileno(), folder / OWNER, wait=False)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    return False


def user_folder(ending: str = "") -> Path:
    """Return the folder `latentmill-UID` + `ending` in the system's temporary folder; it may not exist yet. Raises
    RequestError if it belongs to another user."""
    folder = Path(tempfile.gettempdir()) / f"latentmill-{os.getuid()}{ending}"
    with suppress(FileNotFoundError):
        if folder.lstat().st_uid != os.getuid():
            raise RequestError(f"{folder} belongs to another user. Set TMPDIR to a folder of your own.")
    return folder


def _scratch(scratch: Path | None) -> Path:
    return user_folder(SCRATCH) if scratch is None else scratch / f"latentmill-{os.getuid()}{SCRATCH}"


def _make_private(top: Path, owned: ExitStack) -> Path:
    """Sweep `top`, then create a folder in it that this process owns."""
    with locked(top / SWEEPER):
        _sweep(top.glob("*.*"))
        return _make_owned(top / f"{os.getpid()}.{uuid.uuid4().hex[:12]}", owned)


def _sweep_lock(attempts: Path, tar: str) -> Path:
    return attempts.with_name(f"{attempts.name}.locks") / f"{tar}.lock"


def _make_owned(folder: Path, owned: ExitStack) -> Path:
    """Create a folder that has a locked owner record from the moment it exists under this name. Closing `owned` removes
    the folder and releases the lock."""
    new = folder.with_name(folder.name + NEW)
    while True:
        with ExitStack() as made:
            made.callback(_remove, new)
            made.callback(_remove, folder)
            try:
                owner = made.enter_context(locked(new / OWNER))
                owner.write(json.dumps(_this_machine()).encode())
                owner.flush()
                new.rename(folder)
            except FileNotFoundError:
                continue  # another machine considered the folder abandoned and removed it
            owned.push(made.pop_all())
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
        return ""  # containers often lack a machine-id, and systems other than Linux lack both files


def _made_on_this_machine(folder: Path) -> bool:
    """Return whether the folder was created on this machine, possibly before a reboot, or was never completely
    created."""
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
    # machines may share a host name (localhost), and cloned images share a machine-id, so both must match; a container
    # without a machine-id is recognised only within the same boot
    same_machine = all(owner.get(name) == ours[name] != "" for name in ("host", "machine"))
    return same_boot or same_machine


def _sweep(folders: Iterable[Path]) -> None:
    for folder in folders:
        try:
            if not _made_on_this_machine(folder) or has_live_owner(folder):
                continue
            _remove(folder)
        except NotADirectoryError:
            continue


def _remove(folder: Path) -> None:
    """Remove a folder whose owner is this process or is dead.

    The folder is renamed to end in `.new` first, because its owner record may be deleted before its other files. A
    folder without an owner record is swept later only if it has this suffix, so the rest is swept even if this process
    is killed in between.
    """
    if folder.suffix != NEW:
        with suppress(OSError):
            folder = folder.rename(folder.with_name(folder.name + NEW))
    shutil.rmtree(folder, ignore_errors=True)
