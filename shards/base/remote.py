"""A latents root on an object store, through fsspec.

What such a store gives: a put of one object is atomic, a listing shows what was put before it, and an object can be
created on condition that there is none (`If-None-Match` on S3, `ifGenerationMatch=0` on GCS). What it does not:
renames, and locks that die with their holder. So a lock is a claim: an object `.claims/NAME/00000007` that its
holder created, alone, by that condition, and rewrites every few seconds. The highest number holds. A claim that says it
is free, or has not changed for `LEASE_SECONDS` by the waiter's own clock (no two machines' clocks are compared), is
succeeded by creating the next number, which again only one can do; nothing is ever taken over by deleting.

A holder that was silent for longer than that and wakes up finds a higher number than its own before it writes its
receipt, and fails (`StillHeld`). What it had put by then has the bytes of its successor, if the two ran on the same
kind of machine; whatever they ran on, `python -m shards verify` tells.
"""

import hashlib
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec

from shards.base.errors import WorkError
from shards.base.store import StillHeld, Store

LEASE_SECONDS = 60.0
BEAT_SECONDS = 10.0
POLL_SECONDS = 1.0
FREE = b"free\n"


class RemoteStore(Store):
    """An address on an object store."""

    def __init__(self, address: str):
        self.address = address
        # a listing that was remembered would hide what others commit
        self.fs, self.path = fsspec.core.url_to_fs(address, use_listings_cache=False)
        self.path = self.path.rstrip("/")

    def __reduce__(self) -> tuple[type["RemoteStore"], tuple[str]]:
        return RemoteStore, (self.address,)

    def where(self, name: str = "") -> str:
        return f"{self.address}/{name}" if name else self.address

    def read(self, name: str) -> bytes:
        with self._explained(name, FileNotFoundError):
            return bytes(self.fs.cat_file(self._path(name)))

    def read_many(self, names: list[str]) -> dict[str, bytes]:
        paths = {self._path(name): name for name in names}
        with self._explained(""):
            found = self.fs.cat(list(paths), on_error="return") if paths else {}
        for path, data in found.items():
            if isinstance(data, Exception) and not isinstance(data, FileNotFoundError):
                raise self._error(paths[path], data) from data
        return {paths[path]: bytes(data) for path, data in found.items() if not isinstance(data, Exception)}

    def get(self, name: str, target: Path) -> None:
        with self._explained(name, FileNotFoundError):
            self.fs.get_file(self._path(name), str(target))

    def size(self, name: str) -> int | None:
        with self._explained(name):
            try:
                info = self.fs.info(self._path(name))
            except FileNotFoundError:
                return None
        return int(info["size"]) if info["type"] == "file" else None

    def sha256(self, name: str) -> str:
        with self._explained(name, FileNotFoundError), self.fs.open(self._path(name), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def files(self, folder: str = "") -> list[str]:
        return sorted(self._sizes(folder))

    def entries(self) -> list[str]:
        with self._explained(""):
            try:
                return sorted(Path(path).name for path in self.fs.ls(self.path, detail=False))
            except FileNotFoundError:
                return []

    def write(self, name: str, data: bytes) -> None:
        with self._explained(name):
            self.fs.pipe_file(self._path(name), data)

    def put(self, source: Path, name: str) -> None:
        """As `Store.put`. Objects appear one by one.

        Raises:
            WorkError: what then lies there has not the size of what was put.
        """
        if source.is_dir():
            files = {path.relative_to(source).as_posix(): path for path in source.rglob("*") if path.is_file()}
            foreign = sorted(set(self._sizes(name)) - set(files))
            targets = {f"{name}/{file}": path for file, path in files.items()}
        else:
            foreign, targets = [], {name: source}
        with self._explained(name):
            if foreign:
                self.fs.rm([self._path(f"{name}/{file}") for file in foreign])
            self.fs.put([str(path) for path in targets.values()], [self._path(target) for target in targets])
        for target, path in targets.items():
            if self.size(target) != path.stat().st_size:
                raise WorkError(f"{self.where(target)} has {self.size(target)} bytes of {path.stat().st_size}.")

    @contextmanager
    def local(self, folder: str, names: Sequence[str] | None = None) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="latentmill-") as copy:
            wanted = self.files(folder) if names is None else names
            with self._explained(folder):
                if wanted:
                    sources = [self._path(f"{folder}/{name}") for name in wanted]
                    self.fs.get(sources, [f"{copy}/{name}" for name in wanted])
            yield Path(copy)

    def attempts(self, scratch: Path | None) -> Path:
        root = hashlib.sha256(self.address.encode()).hexdigest()[:12]
        return (scratch or Path(tempfile.gettempdir())) / f"latentmill-attempts-{root}"

    @contextmanager
    def locked(self, name: str) -> Iterator[StillHeld]:
        claim = Claim(self, f".claims/{name}")
        stop = threading.Event()
        beat = threading.Thread(target=claim.keep, args=(stop,), daemon=True)
        beat.start()
        try:
            yield claim.check
        finally:
            stop.set()
            beat.join()
            claim.release()

    def create(self, name: str, data: bytes) -> bool:
        """Put an object on condition that there is none; returns whether there was none."""
        with self._explained(name):
            try:
                self.fs.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return False
        return True

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        with self._explained(name), suppress(FileNotFoundError):
            self.fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def _sizes(self, folder: str) -> dict[str, int]:
        """Every object below `folder`, by name relative to it, and its size."""
        top = self._path(folder)
        with self._explained(folder):
            try:
                found = self.fs.find(top, detail=True)
            except FileNotFoundError:
                return {}
        return {path.removeprefix(f"{top}/"): int(info["size"]) for path, info in found.items() if path != top}

    @contextmanager
    def _explained(self, name: str, *expected: type[Exception]) -> Iterator[None]:
        try:
            yield
        except expected:
            raise
        except Exception as error:  # each store's client has exceptions of its own
            raise self._error(name, error) from error

    def _error(self, name: str, error: Exception) -> WorkError:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else "(no message)"
        return WorkError(
            f"{self.where(name)} cannot be read or written: {type(error).__name__}: {reason}. Check the address, the "
            f"credentials, and the network."
        )


class Claim:
    """One holder's claim to a lock on an object store."""

    def __init__(self, store: RemoteStore, lock: str):
        """Wait until the lock is free or its holder has been silent for `LEASE_SECONDS`, and take it."""
        self.store = store
        self.lock = lock
        self.token = uuid.uuid4().hex
        seen: tuple[int, bytes] | None = None
        since = 0.0
        while True:
            newest = self._newest()
            try:
                state = store.read(self._name(newest)) if newest else FREE
            except FileNotFoundError:
                continue  # succeeded and cleared between the two calls
            if (newest, state) != seen:
                seen, since = (newest, state), time.monotonic()
            takeable = state == FREE or time.monotonic() - since > LEASE_SECONDS
            if takeable and store.create(self._name(newest + 1), self._beat(0)):
                break
            time.sleep(POLL_SECONDS)
        self.number = newest + 1
        for number in self._numbers():
            if number < self.number:
                store.remove(self._name(number))

    def keep(self, stop: threading.Event) -> None:
        """Show that the holder lives, until `stop`."""
        beats = 0
        while not stop.wait(BEAT_SECONDS):
            beats += 1
            try:
                self.store.write(self._name(self.number), self._beat(beats))
            except WorkError:
                continue  # the next one may come through; if none does, others take over, and `check` says so

    def check(self) -> None:
        """Raise WorkError where another has succeeded this claim."""
        if self._newest() != self.number:
            raise WorkError(
                f"{self.store.where(self.lock)} was taken over: this process did not reach the store for "
                f"{LEASE_SECONDS:g} s, and another one went on in its place."
            )

    def release(self) -> None:
        """Let the next one in at once."""
        with suppress(WorkError):  # it runs out
            self.store.write(self._name(self.number), FREE)

    def _numbers(self) -> list[int]:
        return [int(name) for name in self.store.files(self.lock)]

    def _newest(self) -> int:
        return max(self._numbers(), default=0)

    def _name(self, number: int) -> str:
        return f"{self.lock}/{number:08d}"

    def _beat(self, count: int) -> bytes:
        return f"{self.token} {count}\n".encode()
