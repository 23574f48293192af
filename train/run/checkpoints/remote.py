"""Uploading to a run at an object-store URL. The launch works in a local folder and uploads what it saves.

URL/checkpoints/step-00001000.0004/   launch 4's checkpoint, laid out as in a run folder; state.json is uploaded last
   /posthoc/checkpoints/…             snapshots of post-hoc averages, named in the same way
   /config.yaml, metrics.jsonl, …     as of the newest checkpoint
   /launches/                         the leases (`train/run/lease/store.py`)

A launch that was suspended and then superseded may upload when it wakes up. This is harmless for three reasons:

- Each launch uploads to folders that carry its number, so no launch ever overwrites or removes a file that a later one
  has written. state.json is only created, never overwritten; if it exists with different content, an error is raised.
- Readers ignore what a superseded launch uploads, because they count only checkpoints that the newest launch accepted
  or that carry its token.
- A launch lists the files to remove before it checks its lease. If launch 4 passes that check, launch 5 has not
  accepted any checkpoints yet, and everything on launch 4's list has already been replaced by newer checkpoints.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shards.base.errors import Outage, RequestError, WorkError, say
from shards.base.store import STAGING_FOLDER, Store
from train.run.checkpoints.checkpoint import SNAPSHOTS, STATE_NAME, step_of
from train.run.checkpoints.local_copy import launch_folder, parse_folder, stored_checkpoints
from train.run.lease.lease import Lease

NOT_LOGS = {"checkpoints", "launches", "posthoc", STAGING_FOLDER}
"""Entries of a run folder that are not uploaded with the logs."""
FIRST_PAUSE, LONGEST_PAUSE, PATIENCE = 2.0, 60.0, 900.0
"""First and longest pause between upload attempts during an outage, and the longest outage to wait out, in seconds."""


class RemoteRun:
    """Uploader for the launch that holds the lease of a run at an object-store URL."""

    def __init__(self, store: Store, lease: Lease, patience: float = PATIENCE):
        """`patience`: seconds after which an upload fails if the store is still unreachable."""
        self.store, self.lease, self.patience = store, lease, patience

    def upload(self, folder: Path) -> None:
        """Upload a checkpoint or a snapshot of averages from the launch's run folder. state.json is uploaded last.

        Raises:
            Outage: the store was unreachable for `patience` seconds.
            LeaseLost: another launch has taken over.
            WorkError: a launch of a different run at this URL, with the same number, uploaded that checkpoint.
        """
        name = folder.relative_to(self.lease.run_dir).as_posix()
        self.upload_share(name, folder)
        self.complete(name, (folder / STATE_NAME).read_bytes())

    def upload_share(self, name: str, folder: Path) -> None:
        """Upload one process's share of a checkpoint, without state.json. It raises the same errors as `upload`.

        Args:
            name: the checkpoint's folder relative to the run folder, such as `checkpoints/step-00001000`.
        """
        self._retry(name, lambda target: self._upload_below(target, folder))

    def complete(self, name: str, state: bytes) -> None:
        """Upload state.json once all processes have uploaded their shares. It raises the same errors as `upload`."""
        self._retry(name, lambda target: self._complete(target, state))
        self._try_upload_logs()

    def upload_logs(self) -> None:
        """Upload the current config, metrics, plot and tracker files.

        Raises:
            LeaseLost: another launch has taken over.
        """
        self.lease.check()
        work = self.lease.run_dir
        # checkpoints may appear and disappear during the listing, so their folders are skipped
        tops = [path for path in work.iterdir() if path.name not in NOT_LOGS]
        shared = [path for top in tops for path in (files_below(top) if top.is_dir() else [top])]
        self.store.put({path.relative_to(work).as_posix(): path for path in shared})

    @contextmanager
    def logs_uploaded_at_exit(self) -> Iterator[None]:
        """Upload the logs once more when the block ends, however it ends."""
        try:
            yield
        finally:
            try:
                if not self.lease.superseded:
                    self.upload_logs()
            except (RequestError, OSError, Outage) as error:  # resuming needs nothing from this last upload
                say(error)

    def drop_logs(self, choose: Callable[[Collection[str]], list[str]]) -> None:
        """Remove the process output of old launches.

        Args:
            choose: returns the names of the log folders to remove, given the names of all launches' log folders.
        """
        names = self.store.files("logs")
        old = choose({name.partition("/")[0] for name in names})
        if files := [f"logs/{name}" for name in names if name.partition("/")[0] in old]:
            self.store.remove(files)

    def drop_old(self, step: int, choose: Callable[[dict[int, float]], list[int]]) -> None:
        """Remove old checkpoints up to `step`, and orphaned uploads.

        Args:
            choose: returns the steps to remove, given a dict from each checkpoint's step to its age in seconds.

        Raises:
            LeaseLost: another launch has taken over.
        """
        entries, ages, kept = self.store.listing("checkpoints"), dict[int, float](), dict[int, str]()
        for name, stored in stored_checkpoints(self.store).items():
            folder = stored.folder.removeprefix("checkpoints/")
            state = entries.get(f"{folder}/{STATE_NAME}")
            if step_of(Path(name)) <= step and state is not None:
                ages[step_of(Path(name))] = time.time() - state.modified
                kept[step_of(Path(name))] = folder
        for old in choose(ages):
            del kept[old]
        # interrupted uploads and uploads by superseded launches are removed as well
        gone = {folder for name in entries if (folder := name.partition("/")[0]) not in kept.values()}
        self._drop(
            f"checkpoints/{folder}"
            for folder in sorted(gone)
            if (parsed := parse_folder(folder)) and step_of(Path(parsed[0])) <= step
        )

    def drop_later(self, step: int) -> None:
        """Remove the snapshots of averages from after `step`, which the run will write again, perhaps with a different
        learning rate.

        Raises:
            LeaseLost: another launch has taken over.
        """
        folder = f"{SNAPSHOTS}/checkpoints"
        names = {file.partition("/")[0] for file in self.store.files(folder)}
        later = [name for name in names if (parsed := parse_folder(name)) and step_of(Path(parsed[0])) > step]
        self._drop(f"{folder}/{name}" for name in sorted(later))

    def _complete(self, name: str, state: bytes) -> None:
        file = f"{name}/{STATE_NAME}"
        # if the reply was lost and the request retried, the file exists and has this launch's bytes
        if not self.store.create(file, state) and self.store.read(file) != state:
            raise WorkError(
                f"{self.store.where(file)} already exists with different content. Either another launch with the "
                f"number {self.lease.number} wrote the file, because the run was deleted and restarted while this "
                f"launch was suspended, or the file was edited. Nothing was overwritten. Run the command again to "
                f"resume from the newest checkpoint."
            )

    def _retry(self, name: str, upload: Callable[[str], None]) -> None:
        """Call `upload` with the launch's own folder for `name`, retrying during an outage of up to `patience`
        seconds."""
        target = launch_folder(name, self.lease.number)
        pause, deadline = FIRST_PAUSE, time.monotonic() + self.patience
        while True:
            try:
                self.lease.check()
                return upload(target)
            except Outage as error:
                if time.monotonic() + pause > deadline:
                    raise
                print(
                    f"Uploading {target} to {self.store.where()} failed: {error} Retrying in {pause:g} s.", flush=True
                )
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _upload_below(self, name: str, folder: Path) -> None:
        paths = {path.relative_to(folder).as_posix(): path for path in files_below(folder)}
        self.store.put({f"{name}/{file}": path for file, path in paths.items() if file != STATE_NAME})

    def _try_upload_logs(self) -> None:
        try:
            self.upload_logs()
        except Outage as error:  # the checkpoint is complete, and the next one uploads the logs again
            print(f"The logs could not be uploaded to {self.store.where()} and will be retried: {error}", flush=True)

    def _drop(self, folders: Iterable[str]) -> None:
        """Remove the files of some checkpoints, after checking that the lists of them are not outdated."""
        found = [[f"{folder}/{file}" for file in self.store.files(folder)] for folder in folders]
        self.lease.check()
        for files in found:
            # once state.json is removed, readers ignore the rest
            self._remove(sorted(files, key=lambda file: Path(file).name != STATE_NAME))

    def _remove(self, files: list[str]) -> None:
        for some in (files[:1], files[1:]):
            if some:
                self.store.remove(some)


def files_below(folder: Path) -> list[Path]:
    """List every file below `folder`, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())
