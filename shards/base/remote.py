"""A latents root on an object store, through fsspec.

What such a store gives: a put of one object is atomic, a listing shows what was put before it, and an object can be
created on condition that there is none (`If-None-Match` on S3, `ifGenerationMatch=0` on GCS). What it does not:
renames. So nothing here excludes anybody, and the commit rests on that condition alone (`shards/root/commit.py`).
"""

import hashlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec

from shards.base.errors import Outage, RequestError
from shards.base.store import Entry, Store

CONDITIONAL = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"}
"""Kinds of address whose file system creates on condition; others of fsspec's look first, and then write."""
S3 = {"s3", "s3a"}
EXISTS, CONFLICTS = "PreconditionFailed", ("ConditionalRequestConflict", "OperationAborted")
"""What S3 answers where there is an object, and to two that create one in the same moment: to be asked again."""
MODIFIED = ("LastModified", "mtime", "updated", "last_modified", "created")
TRIES, PAUSE_SECONDS = 8, 0.2
PIECES = {"chunksize": 16 << 20, "max_concurrency": 4}
"""How a file goes up to S3, from the disk: 64 MiB of it in memory at a time, of one file."""


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

    def read_range(self, name: str, start: int, end: int) -> bytes:
        with self._explained(name, FileNotFoundError):
            return bytes(self.fs.cat_file(self._path(name), start=start, end=end))

    def read_many(self, names: list[str]) -> dict[str, bytes]:
        paths = {self._path(name): name for name in names}
        with self._explained(""):
            found = self.fs.cat(list(paths), on_error="return") if paths else {}
        for path, data in found.items():
            if isinstance(data, Exception) and not isinstance(data, FileNotFoundError):
                raise outage(self.where(paths[path]), data) from data
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

    def listing(self, folder: str = "") -> dict[str, Entry]:
        top = self._path(folder)
        with self._explained(folder):
            try:
                found = self.fs.find(top, detail=True)
            except FileNotFoundError:
                return {}
        return {path.removeprefix(f"{top}/"): entry_of(info) for path, info in found.items() if path != top}

    def entries(self) -> list[str]:
        with self._explained(""):
            try:
                return sorted(Path(path).name for path in self.fs.ls(self.path, detail=False))
            except FileNotFoundError:
                return []

    def write(self, name: str, data: bytes) -> None:
        with self._explained(name):
            self.fs.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        if not CONDITIONAL.intersection(protocols(self.fs)):
            raise RequestError(
                f"{self.address} is on a kind of store ({', '.join(protocols(self.fs))}) whose client cannot create an "
                f"object on condition that there is none. Two jobs could not be kept apart on it: give an `output` on "
                f"S3, GCS or Azure, or in a folder."
            )
        for last in (*(TRIES - 1) * [False], True):
            with self._explained(name):
                try:
                    self.fs.pipe_file(self._path(name), data, mode="create")
                except OSError as error:
                    if isinstance(error, FileExistsError) or code_of(error) == EXISTS:
                        return False
                    if last or code_of(error) not in CONFLICTS:
                        raise
                else:
                    return True
            time.sleep(PAUSE_SECONDS)
        raise AssertionError("the last try has an outcome")

    def move(self, source: Path, folder: str) -> bool:
        return False

    def put(self, files: Mapping[str, Path]) -> None:
        pieces = PIECES if S3.intersection(protocols(self.fs)) else {}
        for name, path in files.items():
            with self._explained(name):
                self.fs.put_file(str(path), self._path(name), **pieces)

    def remove(self, names: Sequence[str]) -> None:
        with self._explained(next(iter(names), "")), suppress(FileNotFoundError):
            self.fs.rm([self._path(name) for name in names])

    def abort_uploads(self, before: float) -> list[str]:
        if not S3.intersection(protocols(self.fs)):
            return []
        bucket, key, _ = self.fs.split_path(self.path)
        top, names = f"{key}/" if key else "", []
        with self._explained(""):
            for upload in list(self._uploads(bucket, top)):
                if upload["Initiated"].timestamp() < before:
                    self.fs.call_s3(
                        "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
                    names.append(upload["Key"].removeprefix(top))
        return sorted(names)

    def _uploads(self, bucket: str, top: str) -> Iterator[dict[str, Any]]:
        page: dict[str, Any] = {"IsTruncated": True}
        while page["IsTruncated"]:
            after = {f"{name}Marker": page[f"Next{name}Marker"] for name in ("Key", "UploadId") if "Uploads" in page}
            page = self.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=top, **after)
            yield from page.get("Uploads", [])

    @contextmanager
    def local(self, folder: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="latentmill-") as copy:
            if names := self.files(folder):
                with self._explained(folder):
                    self.fs.get([self._path(f"{folder}/{name}") for name in names], [f"{copy}/{n}" for n in names])
            yield Path(copy)

    def attempts(self) -> Path:
        root = hashlib.sha256(self.address.encode()).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"latentmill-attempts-{root}"

    def _path(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def _explained(self, name: str, *expected: type[Exception]) -> AbstractContextManager[None]:
        return explained(self.where(name), *expected)


@contextmanager
def explained(address: str, *expected: type[Exception]) -> Iterator[None]:
    """Inside, `address` is read or written; what is `expected` passes through.

    Raises:
        Outage: the store or the way to it failed.
    """
    try:
        yield
    except expected:
        raise
    except Exception as error:  # each store's client has exceptions of its own
        raise outage(address, error) from error


def outage(address: str, error: Exception) -> Outage:
    """What a store's client said, for people."""
    reason = str(error).strip().splitlines()[-1] if str(error).strip() else "(no message)"
    return Outage(
        f"{address} cannot be read or written: {type(error).__name__}: {reason}. Check the address, the credentials, "
        f"and the network."
    )


def protocols(file_system: Any) -> tuple[str, ...]:
    """The kinds of address that it opens."""
    found = file_system.protocol
    return (found,) if isinstance(found, str) else tuple(found)


def code_of(error: OSError) -> str | None:
    """S3's own word for what went wrong."""
    response = getattr(error.__cause__, "response", None) or {}
    code: str | None = response.get("Error", {}).get("Code")
    return code


def entry_of(info: dict[str, Any]) -> Entry:
    """What a file system of fsspec's says of an object; each has words of its own for it."""
    modified = next((info[word] for word in MODIFIED if info.get(word)), 0)
    if isinstance(modified, str):
        modified = datetime.fromisoformat(modified)
    seconds = modified.timestamp() if isinstance(modified, datetime) else float(modified)
    etag = next((info[word] for word in ("ETag", "etag", "md5") if info.get(word)), seconds)
    return Entry(int(info["size"]), f"{info['size']}-{etag}", seconds)
