"""Reading a run at an object-store URL: finding its checkpoints and copying them to this machine.

Each launch works in a local folder that is named after the token of its lease, so no two launches share files:

    $TMPDIR/latentmill-UID.runs/<hash of the URL>/<token>/NAME/    laid out as a run folder, with the newest checkpoint

A launch reuses the checkpoints that earlier launches left on this machine, even those that were never uploaded, and
removes the folders of superseded launches once it has moved the checkpoint that it resumes from.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shards.base.durable import DamagedFile, copy_file, locked, parse_sealed_json
from shards.base.errors import RequestError, WorkError
from shards.base.scratch import private_folder, user_folder
from shards.base.store import Place, Store
from shards.open import open_store
from train.run.checkpoints.checkpoint import (
    LINES,
    STATE_NAME,
    TRACKER_ID,
    Checkpoint,
    checkpoint_identities,
    newest_intact,
    step_folder,
    step_of,
    verify_checkpoint,
)
from train.run.lease.backend import Backend
from train.run.lease.folder import FolderBackend, publish
from train.run.lease.lease import Lease
from train.run.lease.store import StoreBackend, read_accepted


def work_folder(place: Place) -> Path:
    """Return `place` itself for a run in a folder, or this machine's folder for copies of a run at a URL. Raises
    RequestError if that folder belongs to another user."""
    if isinstance(place, Path):
        return place
    name = hashlib.sha256(place.encode()).hexdigest()[:12]
    return user_folder(".runs") / name


def lease_backend(place: Place, copies: Path | None = None) -> Backend:
    """Return the storage backend of a run's leases.

    Args:
        copies: local folder for copies of a run at a URL; None: the `work_folder` of `place`.
    """
    if isinstance(place, Path):
        return FolderBackend(place, partial(checkpoint_identities, place))
    store = open_store(place)
    return StoreBackend(store, copies or work_folder(place), partial(find_checkpoints, store))


class Stored(NamedTuple):
    """A checkpoint at a run's URL."""

    folder: str
    """Its folder relative to the URL, such as `checkpoints/step-00001000.0004`."""
    sha256: str
    """SHA-256 of its state.json."""


def launch_folder(name: str, launch: int) -> str:
    """Return the remote folder that only `launch` uses for a checkpoint such as `checkpoints/step-00001000`."""
    return f"{name}.{launch:04d}"


def parse_folder(folder: str) -> tuple[str, int] | None:
    """Parse `step-00001000.0004` into the checkpoint's name and the launch's number.

    Returns:
        The name and the number, which is 0 for a plain `step-00001000`; None if it is not a checkpoint's folder.
    """
    match = re.fullmatch(r"(step-\d{8,})(?:\.(\d{4,}))?", folder)
    return (match[1], int(match[2] or 0)) if match else None


def stored_checkpoints(store: Store) -> dict[str, Stored]:
    """Find the checkpoints that belong to the run: those that its newest launch accepted or uploaded.

    Returns:
        Name (`step-00001000`) → where the checkpoint is stored. If several launches wrote the same step, the newest
        launch's checkpoint is returned.
    """
    accepted = read_accepted(store)
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
            print(f"checkpoint {name} is damaged and will be skipped: {error}", flush=True)
            continue
        if accepted is None or accepted.includes(name, sha256, content.get("token")):
            found[name] = Stored(file.removesuffix(f"/{STATE_NAME}"), sha256)
    return found


def find_checkpoints(store: Store) -> dict[str, str]:
    """Return a dict from the name of each checkpoint that belongs to the run to the SHA-256 of its state.json."""
    return {name: stored.sha256 for name, stored in stored_checkpoints(store).items()}


def find(
    store: Store, copies: Path, downloads: ExitStack, single_node: bool = False
) -> tuple[dict[str, str], Checkpoint | None]:
    """Find the newest intact checkpoint of the run at `store`. Nothing is changed there or in `copies`.

    If `copies` contains the checkpoint, that copy is used in place; otherwise the checkpoint is downloaded to a private
    folder. Each of its files is hashed only once.

    Args:
        copies: this machine's folder for copies of the run.
        downloads: closing it removes the private folder.
        single_node: whether all processes are on this machine, so that a checkpoint that was never uploaded can be
            used.

    Returns:
        The result of `find_checkpoints`, and the newest intact checkpoint; None if the run has no checkpoints.

    Raises:
        RequestError: the run has checkpoints, but all are damaged.
    """
    stored = stored_checkpoints(store)
    found = {name: each.sha256 for name, each in stored.items()}
    orphan = find_orphan(store, copies, found) if single_node else None
    if orphan is not None:
        print(
            f"The checkpoint {orphan.folder.name} is complete on this machine but was not uploaded to {store.where()}, "
            f"so the local copy is used.",
            flush=True,
        )
        return found, orphan
    return found, newest_stored(store, stored, lambda name: obtain(store, stored[name], name, copies, downloads))


def newest_stored(store: Store, stored: Mapping[str, Stored], obtain: Callable[[str], Checkpoint]) -> Checkpoint | None:
    """Return the newest intact checkpoint in `stored`, or None if `stored` is empty.

    Args:
        obtain: copies the named checkpoint to this machine and verifies it.
    """
    names = sorted(stored, key=lambda name: step_of(Path(name)))
    return newest_intact(names, obtain, store.where(), "choose a different run_dir to train from scratch")


def local_checkpoints(copies: Path) -> list[Path]:
    """List the checkpoint folders that launches of the run left on this machine, oldest step first."""
    folders = copies.glob("*/*/checkpoints/step-*")
    return sorted((folder for folder in folders if re.fullmatch(r"step-\d{8,}", folder.name)), key=step_of)


def find_orphan(store: Store, copies: Path, found: Mapping[str, str]) -> Checkpoint | None:
    """Find a complete local checkpoint that was never uploaded and is newer than every checkpoint `found` at the URL.

    It counts only if the newest launch at the URL wrote or accepted it. Return None if there is no such checkpoint.
    """
    accepted, newest = read_accepted(store), max((step_of(Path(name)) for name in found), default=0)
    for folder in reversed(local_checkpoints(copies)):
        if accepted is None or step_of(folder) <= newest:
            return None
        try:
            checkpoint = verify_checkpoint(folder)
        except DamagedFile:
            continue
        if accepted.includes(folder.name, sha256_of_state(folder) or "", checkpoint.content.get("token")):
            return checkpoint
    return None


def obtain(store: Store, stored: Stored, name: str, copies: Path, downloads: ExitStack) -> Checkpoint:
    """Return the checkpoint `name`. Use the copy in `copies` if it is intact; otherwise download the checkpoint.

    Args:
        downloads: closing it removes the private folder of the download.

    Raises:
        DamagedFile: a file at the URL is missing or does not match its SHA-256.
    """
    for local in local_checkpoints(copies):
        if local.name == name and sha256_of_state(local) == stored.sha256:
            try:
                return verify_checkpoint(local)
            except DamagedFile as error:
                print(
                    f"The copy of the checkpoint {name} on this machine is damaged and will be downloaded again: "
                    f"{error}",
                    flush=True,
                )
    work = downloads.enter_context(private_folder()) / store.where().rstrip("/").rpartition("/")[2]
    return download(store, stored, work / "checkpoints" / name)


def obtain_same(store: Store, checkpoint: Checkpoint, copies: Path, downloads: ExitStack) -> Checkpoint:
    """Obtain the checkpoint that the main process found, on a machine where the main process does not run.

    Raises:
        DamagedFile: a file at the URL is missing or does not match its SHA-256.
        WorkError: the checkpoint has since been replaced or removed.
    """
    name = checkpoint.folder.name
    stored = stored_checkpoints(store).get(name)
    copy = obtain(store, stored, name, copies, downloads) if stored is not None else None
    if copy is None or copy.content != checkpoint.content:
        raise replaced(store, name)
    return copy


def replaced(store: Store, name: str) -> WorkError:
    """Build the error for a checkpoint that was replaced or removed after this launch found it."""
    return WorkError(
        f"{store.where()} no longer has the checkpoint {name} that this launch found when it started: another launch "
        f"replaced or removed it. Run the command again to resume from the newest checkpoint."
    )


def install(checkpoint: Checkpoint | None, lease: Lease, store: Store, copies: Path) -> None:
    """Set up this machine's folder for a launch that holds the lease, and remove the folders of earlier launches.

    `checkpoint` is moved into the launch's folder, the logs up to its step are copied out of it, and the run's ID in
    its tracker is downloaded. If the checkpoint has no logs, the run's are downloaded.

    Raises:
        LeaseLost: another launch has taken over.
        WorkError: another launch, which was suspended while starting, has moved the checkpoint away. Nothing is lost,
            because the next launch finds the checkpoint in that launch's folder.
    """
    work, staging = lease.run_dir, lease.folder
    lease.check()
    # nodes may share a temporary folder; a suspended launch cannot block others, because each launch has its own lock
    with locked(copies / lease.token / ".lock"):
        staging.mkdir(parents=True, exist_ok=True)
        download_log(TRACKER_ID, store, work, staging)
        if checkpoint is not None:
            target = work / "checkpoints" / checkpoint.folder.name
            if not target.exists():
                target.parent.mkdir(exist_ok=True)
                source = checkpoint.folder
                try:
                    # a single rename if possible, so that a kill cannot lose a checkpoint that was never uploaded; a
                    # download may be on a different file system, and is moved to this one first
                    if not source.is_relative_to(copies):
                        source = Path(shutil.move(source, staging / source.name))
                    publish(source, target, staging)
                except FileNotFoundError as error:
                    raise replaced(store, checkpoint.folder.name) from error
            for path in sorted((target / LINES).glob("*")):
                publish(copy_file(path, staging / path.name), work / path.name, staging)
            if not (target / LINES).exists():  # the run was in a local folder, which was then copied to the URL
                for name in ("metrics.jsonl", "samples.jsonl"):
                    download_log(name, store, work, staging)
        remove_stale_copies(lease, copies)


def remove_stale_copies(lease: Lease, copies: Path) -> None:
    """Remove the folders of superseded launches from this machine.

    Each folder is renamed first, so that a suspended owner can no longer write to it.

    Raises:
        LeaseLost: another launch has taken over.
    """
    others = [folder for folder in copies.iterdir() if folder.name != lease.token]
    # A launch creates its folder only after acquiring the run. So if this launch is still the newest after the folders
    # were listed, all their owners have been superseded, even if this launch is then suspended before removing them.
    lease.check()
    for folder in others:
        with suppress(FileNotFoundError):  # another node that shares the temporary folder has moved it
            folder.rename(lease.folder / folder.name)
        shutil.rmtree(lease.folder / folder.name, ignore_errors=True)


@contextmanager
def copied(address: str, step: int | None) -> Iterator[tuple[Path, Checkpoint]]:
    """Copy a run at a URL to a temporary run folder, with only one of its checkpoints, its metrics and its
    evaluations. If this process is killed, the next one on this machine removes the folder.

    Args:
        step: step of the checkpoint to copy; None: the newest intact checkpoint.

    Yields:
        The folder, and the verified checkpoint in it.

    Raises:
        RequestError: there is no run at the URL, or the run has no such checkpoint.
        DamagedFile: a file of the checkpoint for `step` is missing or does not match its SHA-256.
    """
    store = open_store(address)
    with private_folder() as scratch:
        run = scratch / address.rpartition("/")[2]
        run.mkdir()
        try:
            store.get("config.yaml", run / "config.yaml")
        except FileNotFoundError:
            raise RequestError(f"{address} is not a run: it has no config.yaml. Pass the URL of a run.") from None
        stored = stored_checkpoints(store)

        def obtained(name: str) -> Checkpoint:
            return download(store, stored[name], run / "checkpoints" / name)

        if step is None:
            checkpoint = newest_stored(store, stored, obtained)
            if checkpoint is None:
                raise RequestError(f"{address} has no complete checkpoint yet, so there is nothing to export.")
        else:
            name = step_folder(run, step).name
            if name not in stored:
                available = f"It has {', '.join(sorted(stored))}." if stored else "It has no complete checkpoint yet."
                raise RequestError(f"{address} has no checkpoint {name}. {available}")
            checkpoint = obtained(name)
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            with suppress(FileNotFoundError):
                store.get(name, run / name)
        yield run, checkpoint


def download_log(name: str, store: Store, work: Path, staging: Path) -> None:
    """Download a file of the run into its local folder, if the run has that file."""
    with suppress(FileNotFoundError):
        store.get(name, staging / name)
        publish(staging / name, work / name, staging)


def sha256_of_state(folder: Path) -> str | None:
    """Return the SHA-256 of a checkpoint's state.json, or None if the file does not exist."""
    path = folder / STATE_NAME
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def download(store: Store, stored: Stored, target: Path) -> Checkpoint:
    """Download a checkpoint to the new folder `target`, and verify it. If this fails, `target` is removed.

    Raises:
        DamagedFile: a file at the URL is missing or does not match its SHA-256.
    """
    target.mkdir(parents=True)
    try:
        for file in store.files(stored.folder):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # removed since the listing; verification fails then
                store.get(f"{stored.folder}/{file}", target / file)
        return verify_checkpoint(target)
    except BaseException:
        shutil.rmtree(target)
        raise
