"""What of a run at an address counts, and how it comes to this machine; `away.py` says how it lies there."""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from shards.base.durable import DamagedFile, fsync_tree, parse_sealed_json
from shards.base.errors import RequestError
from shards.base.store import Place, Store
from shards.open import open_store
from train.run.launches import TRACKER_ID
from train.run.saving.checkpoint import (
    LINES,
    STATE_NAME,
    Checkpoint,
    list_checkpoints,
    step_folder,
    step_of,
    verify_checkpoint,
)


def work_folder(place: Place, shelf: str = "runs") -> Path:
    """Where this machine has a run: in its run folder, or, of one at an address, in the temporary folder.

    Args:
        shelf: `runs`, of the launch that holds it; `read`, of those who only take its weights.
    """
    if isinstance(place, Path):
        return place
    name = hashlib.sha256(place.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"latentmill-{shelf}-{os.getuid()}" / name / place.rpartition("/")[2]


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


def bring(store: Store, work: Path, alone: bool = False) -> dict[str, str]:
    """Have the newest sound checkpoint of the run in `work`, and no other; returns what `find_checkpoints` does.

    Args:
        alone: no other machine needs it, so it may be one of this machine that never got to the address.

    Raises:
        RequestError: there are checkpoints, and all are damaged.
    """
    found = find_checkpoints(store)
    work.mkdir(parents=True, exist_ok=True)
    bring_tracker_id(store, work)
    ahead = find_ahead(store, work, found) if alone else None
    for folder in list_checkpoints(work):
        if sha256_of_state(folder) != found.get(folder.name) and folder != ahead:
            shutil.rmtree(folder)
    if ahead is not None:
        print(f"{ahead.name} is whole on this machine and not at {store.where()} yet.", flush=True)
        copy_lines(ahead, work)
        return found
    for name in sorted(found, key=lambda name: step_of(Path(name)), reverse=True):
        try:
            checkpoint = fetch(store, work, name)
        except DamagedFile as error:
            print(f"checkpoint {name} is damaged and passed over: {error}", flush=True)
            continue
        copy_lines(checkpoint.folder, work)
        return found
    if found:
        raise RequestError(
            f"Every checkpoint of {store.where()} is damaged ({', '.join(sorted(found))}). Restore one from a copy; or "
            f"give another run_dir to train from the start."
        )
    for path in work.glob("*.jsonl"):
        path.unlink()
    return found


def find_ahead(store: Store, work: Path, found: Mapping[str, str]) -> Path | None:
    """A whole checkpoint of this machine that is newer than all that are `found` at the address: the launch whose word
    holds there made it, so the run would have gone on from it, and ended before it was put. None: there is none."""
    number = newest_accepting(store)
    for folder in reversed(list_checkpoints(work)):
        if number == 0 or step_of(folder) <= max((step_of(Path(name)) for name in found), default=0):
            return None
        try:
            content = verify_checkpoint(folder).content
        except DamagedFile:
            continue
        # numbers begin again where a run was removed and begun anew
        if content.get("token") == json.loads(store.read(f"launches/{number:04d}.json"))["token"]:
            return folder
    return None


def copy_lines(folder: Path, work: Path) -> None:
    """The logs up to a checkpoint => the run folder of this machine."""
    for path in sorted((folder / LINES).glob("*")):
        shutil.copyfile(path, work / path.name)


@contextmanager
def copied(address: str, step: int | None) -> Iterator[Path]:
    """A run at an address as a run folder here, with one checkpoint: of `step`, or the newest sound one; gone after.

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
        if step is None:
            bring(store, run)
        else:
            name = step_folder(run, step).name
            if name not in (found := find_checkpoints(store)):
                there = f"It has {', '.join(sorted(found))}." if found else "It has no complete one yet."
                raise RequestError(f"{address} has no checkpoint {name}. {there}")
            fetch(store, run, name)
        yield run


def bring_tracker_id(store: Store, work: Path) -> None:
    """The run's id in its tracker, where it has one."""
    with suppress(FileNotFoundError):
        store.get(TRACKER_ID, work / TRACKER_ID)


def sha256_of_state(folder: Path) -> str | None:
    """Of a checkpoint's state.json; None where there is none."""
    path = folder / STATE_NAME
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def fetch(store: Store, work: Path, name: str) -> Checkpoint:
    """The checkpoint `step-…` in the folder of this machine, whole; copied there unless it is there already.

    Raises:
        DamagedFile: what is missing at the address, or differs.
    """
    stored = stored_checkpoints(store).get(name)
    if stored is None:
        raise DamagedFile(f"{store.where()} no longer has the checkpoint {name}.")
    target = work / "checkpoints" / name
    try:
        return verify_checkpoint(target)
    except DamagedFile:
        shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    for unfinished in target.parent.glob("step-*.*"):  # of whoever was killed
        shutil.rmtree(unfinished, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}.", dir=target.parent) as private:
        copy = Path(private) / name
        for file in store.files(stored.folder):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            try:
                store.get(f"{stored.folder}/{file}", copy / file)
            except FileNotFoundError:
                continue  # it went meanwhile; whether it is missed, its state.json says
        verify_checkpoint(copy)
        fsync_tree(copy)
        copy.rename(target)
    return verify_checkpoint(target)
