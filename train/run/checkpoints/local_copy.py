"""What of a run at an address counts, and how it comes to this machine; `away.py` says how it lies there."""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from shards.base.durable import DamagedFile, copy_file, fsync_tree, parse_sealed_json
from shards.base.errors import RequestError, WorkError
from shards.base.scratch import private_folder
from shards.base.store import Place, Store
from shards.open import open_store
from train.run.checkpoints.checkpoint import (
    LINES,
    STATE_NAME,
    Checkpoint,
    list_checkpoints,
    step_folder,
    step_of,
    verify_checkpoint,
)
from train.run.launches import TRACKER_ID, publish, remove


def work_folder(place: Place) -> Path:
    """Return this machine's folder of a run: the run folder, or a temporary folder if the run is at an address."""
    if isinstance(place, Path):
        return place
    name = hashlib.sha256(place.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"latentmill-runs-{os.getuid()}" / name / place.rpartition("/")[2]


class Stored(NamedTuple):
    """A checkpoint at a run's address."""

    folder: str
    """Its folder there: `checkpoints/step-00001000.0004`."""
    sha256: str
    """SHA-256 of its state.json."""


def remote_folder(name: str, launch: int) -> str:
    """The folder at the address to which a launch, and no other, uploads its checkpoint `step-00001000`."""
    return f"checkpoints/{name}.{launch:04d}"


def parse_folder(folder: str) -> tuple[str, int] | None:
    """`step-00001000.0004` → its checkpoint and its launch, which is 0 for a plain `step-00001000`; None: neither."""
    match = re.fullmatch(r"(step-\d{8,})(?:\.(\d{4,}))?", folder)
    return (match[1], int(match[2] or 0)) if match else None


def stored_checkpoints(store: Store) -> dict[str, Stored]:
    """Find the checkpoints that make up the run: those that its newest launch accepted, and those that it uploaded.

    Returns:
        Their names (`step-00001000`) → where they are. Of several of one step, the one by the newest launch.
    """
    number = newest_accepting(store)
    accepted = json.loads(store.read(f"launches/{number:04d}.accepted.json")) if number else {}
    token = json.loads(store.read(f"launches/{number:04d}.json"))["token"] if number else None
    states = {}
    for file in store.files("checkpoints"):
        folder, _, rest = file.partition("/")
        if rest == STATE_NAME and (parsed := parse_folder(folder)):
            states[f"checkpoints/{file}"] = parsed
    found = {}
    for file, data in sorted(store.read_many(list(states)).items(), key=lambda item: states[item[0]]):
        name, sha256 = states[file][0], hashlib.sha256(data).hexdigest()
        try:
            content = parse_sealed_json(data, store.where(file))
        except DamagedFile as error:
            print(f"checkpoint {name} is damaged and passed over: {error}", flush=True)
            continue
        # a stale launch has a different token, and a number of its own
        if number == 0 or content.get("token") == token or accepted.get(name) == sha256:
            found[name] = Stored(file.removesuffix(f"/{STATE_NAME}"), sha256)
    return found


def find_checkpoints(store: Store) -> dict[str, str]:
    """Name → SHA-256 of state.json, of the checkpoints that make up the run."""
    return {name: stored.sha256 for name, stored in stored_checkpoints(store).items()}


def newest_accepting(store: Store) -> int:
    """The launch whose word on the run's checkpoints holds; 0: there was none."""
    accepting = [int(name[:-14]) for name in store.files("launches") if name.endswith(".accepted.json")]
    return max(accepting, default=0)


def find(
    store: Store, work: Path, downloads: ExitStack, alone: bool = False
) -> tuple[dict[str, str], Checkpoint | None]:
    """Find the newest sound checkpoint of the run at `store`. Changes nothing there, nor in `work`.

    The checkpoint is used where it is if `work` has it, and downloaded to a private folder otherwise. Each of its files
    is hashed once.

    Args:
        work: this machine's folder of the run.
        downloads: closing it removes the private folder.
        alone: whether no other machine needs the checkpoint, so that it may be one that was never uploaded.

    Returns:
        What `find_checkpoints` returns, and the checkpoint; None if there is none.

    Raises:
        RequestError: there are checkpoints, and all are damaged.
    """
    stored = stored_checkpoints(store)
    found = {name: each.sha256 for name, each in stored.items()}
    ahead = find_ahead(store, work, found) if alone else None
    if ahead is not None:
        print(f"{ahead.folder.name} is whole on this machine and not at {store.where()} yet.", flush=True)
        return found, ahead
    return found, newest_stored(store, stored, lambda name: obtain(store, stored[name], name, work, downloads))


def newest_stored(
    store: Store, stored: Mapping[str, Stored], obtained: Callable[[str], Checkpoint]
) -> Checkpoint | None:
    """The newest of the `stored` checkpoints that is sound, on this machine; None: none is stored.

    Args:
        obtained: brings the checkpoint of a name to this machine, and verifies it.

    Raises:
        RequestError: all are damaged.
    """
    for name in sorted(stored, key=lambda name: step_of(Path(name)), reverse=True):
        try:
            return obtained(name)
        except DamagedFile as error:
            print(f"checkpoint {name} is damaged and passed over: {error}", flush=True)
    if stored:
        raise RequestError(
            f"Every checkpoint of {store.where()} is damaged ({', '.join(sorted(stored))}). Restore one from a copy; "
            f"or give another run_dir to train from the start."
        )
    return None


def find_ahead(store: Store, work: Path, found: Mapping[str, str]) -> Checkpoint | None:
    """The newest whole checkpoint on this machine that is newer than all that are `found` at the address, and that the
    newest launch there wrote or accepted, but did not live to upload. None: there is none."""
    number = newest_accepting(store)
    for folder in reversed(list_checkpoints(work)):
        if number == 0 or step_of(folder) <= max((step_of(Path(name)) for name in found), default=0):
            return None
        try:
            checkpoint = verify_checkpoint(folder)
        except DamagedFile:
            continue
        # launch numbers say nothing: they start again when a run is deleted and started anew
        wrote = checkpoint.content.get("token") == json.loads(store.read(f"launches/{number:04d}.json"))["token"]
        accepted = json.loads(store.read(f"launches/{number:04d}.accepted.json"))
        if wrote or accepted.get(folder.name) == sha256_of_state(folder):
            return checkpoint
    return None


def obtain(store: Store, stored: Stored, name: str, work: Path, downloads: ExitStack) -> Checkpoint:
    """The checkpoint `name`: in `work` if it is there and sound, otherwise downloaded, as `find` says.

    Raises:
        DamagedFile: a file at the address is missing or differs.
    """
    local = work / "checkpoints" / name
    if sha256_of_state(local) == stored.sha256:
        try:
            return verify_checkpoint(local)
        except DamagedFile as error:
            print(f"{name} is downloaded again, because its copy on this machine is damaged: {error}", flush=True)
    return download(store, stored, downloads.enter_context(private_folder()) / work.name / "checkpoints" / name)


def obtain_same(store: Store, checkpoint: Checkpoint, work: Path, downloads: ExitStack) -> Checkpoint:
    """Obtain, on a different machine, the checkpoint that the main process found.

    Raises:
        DamagedFile: a file at the address is missing or differs.
        WorkError: the checkpoint was replaced or removed meanwhile.
    """
    name = checkpoint.folder.name
    stored = stored_checkpoints(store).get(name)
    copy = obtain(store, stored, name, work, downloads) if stored is not None else None
    if copy is None or copy.content != checkpoint.content:
        raise WorkError(
            f"{store.where()} no longer has the checkpoint {name} that this launch found at its start: a different "
            f"launch replaced or removed it. Run the command again to resume from the newest one."
        )
    return copy


def install(checkpoint: Checkpoint | None, work: Path, folder: Path) -> None:
    """Move `checkpoint` to this machine's folder of the run, copy the logs up to its step there, and remove all other
    checkpoints; without a checkpoint, remove the logs as well.

    Only a launch that owns the run may do this, because other launches may need what it removes.

    Args:
        folder: below `work`, and this launch's own: every change is a rename from or to it.

    Raises:
        FileNotFoundError: another launch has taken over, and `folder` with it.
    """
    kept = None if checkpoint is None else checkpoint.folder
    for other in (*list_checkpoints(work), *(work / "checkpoints").glob("step-*.*")):  # interrupted ones, too
        if other != kept:
            remove(other, folder)
    if checkpoint is None:
        for path in work.glob("*.jsonl"):
            path.replace(folder / path.name).unlink()
        return
    target = work / "checkpoints" / checkpoint.folder.name
    if checkpoint.folder != target:
        moved = Path(shutil.move(checkpoint.folder, folder / target.name))
        fsync_tree(moved)
        target.parent.mkdir(parents=True, exist_ok=True)
        publish(moved, target, folder)
    for path in sorted((target / LINES).glob("*")):
        publish(copy_file(path, folder / path.name), work / path.name, folder)


@contextmanager
def copied(address: str, step: int | None) -> Iterator[tuple[Path, Checkpoint]]:
    """Copy a run at an address to a temporary run folder, with one checkpoint: of `step`, or the newest sound one.

    Yields:
        The folder, and the checkpoint in it, which has been verified.

    Raises:
        RequestError: there is no run, or no such checkpoint in it.
        DamagedFile: the checkpoint of `step` is not as it was written.
    """
    store = open_store(address)
    with tempfile.TemporaryDirectory(prefix="latentmill-") as scratch:
        run = Path(scratch) / address.rpartition("/")[2]
        run.mkdir()
        try:
            store.get("config.yaml", run / "config.yaml")
        except FileNotFoundError:
            raise RequestError(f"{address} holds no run: it has no config.yaml. Give a run's address.") from None
        stored = stored_checkpoints(store)

        def obtained(name: str) -> Checkpoint:
            return download(store, stored[name], run / "checkpoints" / name)

        if step is None:
            checkpoint = newest_stored(store, stored, obtained)
            if checkpoint is None:
                raise RequestError(f"{address} has no complete checkpoint: there is nothing to export yet.")
        else:
            name = step_folder(run, step).name
            if name not in stored:
                there = f"It has {', '.join(sorted(stored))}." if stored else "It has no complete one yet."
                raise RequestError(f"{address} has no checkpoint {name}. {there}")
            checkpoint = obtained(name)
        yield run, checkpoint


def bring_tracker_id(store: Store, work: Path, folder: Path) -> None:
    """The run's id in its tracker, where it has one; `folder`: the launch's own."""
    with suppress(FileNotFoundError):
        store.get(TRACKER_ID, folder / TRACKER_ID)
        publish(folder / TRACKER_ID, work / TRACKER_ID, folder)


def sha256_of_state(folder: Path) -> str | None:
    """Of a checkpoint's state.json; None where there is none."""
    path = folder / STATE_NAME
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def download(store: Store, stored: Stored, target: Path) -> Checkpoint:
    """Download a checkpoint to the new folder `target`, and hash it; if it is damaged, nothing stays.

    Raises:
        DamagedFile: a file is missing at the address, or differs.
    """
    target.mkdir(parents=True)
    try:
        for file in store.files(stored.folder):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # it was removed meanwhile; state.json says whether it is missed
                store.get(f"{stored.folder}/{file}", target / file)
        return verify_checkpoint(target)
    except BaseException:
        shutil.rmtree(target)
        raise
