"""Object stores, accessed through fsspec.

An object store offers atomic writes of single objects, consistent listings, and create-if-absent (`If-None-Match` on
S3, `ifGenerationMatch=0` on GCS), but no renames. Nothing here takes a lock: the commit protocol relies on
create-if-absent alone (`shards/root/commit.py`).
"""

import errno
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec

from shards.base.errors import Outage, RequestError
from shards.base.store import Entry, Store

CREATE_IF_ABSENT = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"}
"""URL schemes whose fsspec client supports atomic create-if-absent. Other clients check whether the object exists and
then write it, which is not atomic."""
S3 = {"s3", "s3a"}
EXISTS, CONFLICTS = "PreconditionFailed", ("ConditionalRequestConflict", "OperationAborted")
"""S3 error codes for an object that already exists, and for concurrent create requests that collided and must be
retried."""
BUSY = {408, 429}
"""HTTP status codes below 500 that say nothing about the file: request timeout and too many requests."""
MODIFIED_KEYS = ("LastModified", "mtime", "updated", "last_modified", "created")
MAX_ATTEMPTS, RETRY_SECONDS = 8, 0.2
FULL_DISK = {errno.ENOSPC, errno.EDQUOT}
"""Errors that only a local disk causes. s3fs also reports EIO, for unknown errors of the object store."""
NUM_REMOVERS = 16
"""Number of files that are removed at a time."""
S3_UPLOAD_OPTIONS = {"chunksize": 16 << 20, "max_concurrency": 4}
"""S3 multipart upload settings, which limit memory to 64 MiB per upload."""


class RemoteStore(Store):
    """Store at an object-store URL."""

    def __init__(self, address: str):
        self.address = address
        # a cached listing would hide commits by other processes
        self.fs, self.path = fsspec.core.url_to_fs(address, use_listings_cache=False)
        self.path = self.path.rstrip("/")

    def __reduce__(self) -> tuple[type["RemoteStore"], tuple[str]]:
        return RemoteStore, (self.address,)

    def where(self, name: str = "") -> str:
        return f"{self.address}/{name}" if name else self.address

    def read(self, name: str) -> bytes:
        with self._store_errors(name, FileNotFoundError):
            return bytes(self.fs.cat_file(self._path(name)))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        with self._store_errors(name, FileNotFoundError):
            try:
                return bytes(self.fs.cat_file(self._path(name), start=start, end=end))
            except FileNotFoundError:
                raise
            except Exception:
                # a range that starts at or past the end may be an error (HTTP 416), which each client reports in its
                # own way
                with suppress(Exception):  # the first error says more
                    found = self.fs.info(self._path(name))
                    if found["type"] == "file" and found["size"] <= start:
                        return b""
                raise

    def read_many(self, names: list[str]) -> dict[str, bytes]:
        with self._store_errors(""):
            # fsspec's `cat` treats names with *, ? or [ as patterns
            found = self.fs.cat_ranges([self._path(name) for name in names], None, None, on_error="return")
        contents = dict(zip(names, found, strict=True))
        for name, data in contents.items():
            if isinstance(data, Exception) and not isinstance(data, FileNotFoundError):
                raise outage(self.where(name), data) from data
        return {name: bytes(data) for name, data in contents.items() if not isinstance(data, Exception)}

    def get(self, name: str, target: Path) -> None:
        with download_errors(self.where(name), target.parent, FileNotFoundError):
            self.fs.get_file(self._path(name), str(target))

    def size(self, name: str) -> int | None:
        try:
            with self._store_errors(name, FileNotFoundError):
                info = self.fs.info(self._path(name))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def sha256(self, name: str) -> str:
        with self._store_errors(name, FileNotFoundError), self.fs.open(self._path(name), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def listing(self, folder: str = "") -> dict[str, Entry]:
        top = self._path(folder)
        with self._store_errors(folder):
            try:
                found = self.fs.find(top, detail=True)
            except FileNotFoundError:
                return {}
        names = {path.removeprefix(f"{top}/"): info for path, info in found.items() if path != top}
        # consoles mark a folder with an object whose name ends in /
        return {name: entry_from_info(info) for name, info in names.items() if name and not name.endswith("/")}

    def entries(self) -> list[str]:
        with self._store_errors(""):
            try:
                listed = (path.rstrip("/") for path in self.fs.ls(self.path, detail=False))
                return sorted(Path(path).name for path in listed if path != self.path.rstrip("/"))
            except FileNotFoundError:
                return []

    def write(self, name: str, data: bytes) -> None:
        with self._store_errors(name):
            self.fs.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        if not CREATE_IF_ABSENT.intersection(protocols(self.fs)):
            raise RequestError(
                f"{self.address} is on a store ({', '.join(protocols(self.fs))}) whose client does not support "
                f"create-if-absent, so concurrent jobs could overwrite each other. Use S3, GCS, Azure or a local "
                f"folder instead."
            )
        for is_last in (*(MAX_ATTEMPTS - 1) * [False], True):
            with self._store_errors(name):
                try:
                    self.fs.pipe_file(self._path(name), data, mode="create")
                except OSError as error:
                    if isinstance(error, FileExistsError) or s3_error_code(error) == EXISTS:
                        return False
                    if is_last or s3_error_code(error) not in CONFLICTS:
                        raise
                else:
                    return True
            time.sleep(RETRY_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    def move(self, source: Path, folder: str) -> bool:
        return False

    def put(self, files: Mapping[str, Path]) -> None:
        options = S3_UPLOAD_OPTIONS if S3.intersection(protocols(self.fs)) else {}
        for name, path in files.items():
            with self._store_errors(name):
                self.fs.put_file(str(path), self._path(name), **options)

    def remove(self, names: Sequence[str]) -> None:
        def remove_one(name: str) -> None:
            with self._store_errors(name), suppress(FileNotFoundError):
                self.fs.rm_file(self._path(name))

        # fsspec's `rm` treats names with *, ? or [ as patterns, and s3fs does not report what its `rm` failed to remove
        with ThreadPoolExecutor(NUM_REMOVERS) as threads:
            list(threads.map(remove_one, names))

    def abort_uploads(self, before: float) -> list[str]:
        if not S3.intersection(protocols(self.fs)):
            return []
        bucket, key, _ = self.fs.split_path(self.path)
        top, names = f"{key}/" if key else "", []
        with self._store_errors(""):
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
                with download_errors(self.where(folder), Path(copy)):
                    self.fs.get([self._path(f"{folder}/{name}") for name in names], [f"{copy}/{n}" for n in names])
            yield Path(copy)

    def attempts(self) -> Path:
        root = hashlib.sha256(self.address.encode()).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"latentmill-{os.getuid()}.attempts" / root

    def _path(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def _store_errors(self, name: str, *expected: type[Exception]) -> AbstractContextManager[None]:
        return store_errors(self.where(name), *expected)


@contextmanager
def store_errors(address: str, *expected: type[Exception]) -> Iterator[None]:
    """Convert any exception raised in the block, except the `expected` types, to an `Outage` that names `address`.
    A web server that cannot be reached does not count as a missing file."""
    try:
        yield
    except expected as error:
        if isinstance(error, FileNotFoundError) and (cause := failed_request(error)):
            raise outage(address, cause) from error
        raise
    except Exception as error:  # every client library has its own exception types
        raise outage(address, error) from error


@contextmanager
def download_errors(address: str, target: Path, *expected: type[Exception]) -> Iterator[None]:
    """Convert exceptions as `store_errors` does, but if the disk is full, name the folder `target` in the `Outage`."""
    with store_errors(address, Outage, *expected):
        try:
            yield
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            raise Outage(
                f"{address} cannot be downloaded, because the disk of {target} is full or over quota ({error}). Free "
                f"space there. If the folder is the training cache, you can also lower data.cache_limit."
            ) from error


def outage(address: str, error: Exception) -> Outage:
    """Build the user-facing `Outage` for an exception that a store's client raised."""
    reason = str(error).strip().splitlines()[-1] if str(error).strip() else "(no message)"
    return Outage(
        f"{address} cannot be read or written: {type(error).__name__}: {reason.rstrip('.')}. Check the URL, the "
        f"credentials and the network."
    )


def failed_request(error: FileNotFoundError) -> Exception | None:
    """Return why a web server did not answer whether a file exists, or None if it did. fsspec raises FileNotFoundError
    in either case."""
    cause = error.__cause__
    if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
        return cause
    if not (isinstance(cause, Exception) and type(cause).__module__.startswith("aiohttp")):
        return None
    status = getattr(cause, "status", None)  # absent if there was no answer
    return cause if status is None or status >= 500 or status in BUSY else None


def protocols(file_system: Any) -> tuple[str, ...]:
    """Return the URL schemes that a file system handles."""
    found = file_system.protocol
    return (found,) if isinstance(found, str) else tuple(found)


def s3_error_code(error: OSError) -> str | None:
    """Return the error code of the S3 response behind `error`, if any."""
    response = getattr(error.__cause__, "response", None) or {}
    code: str | None = response.get("Error", {}).get("Code")
    return code


def entry_from_info(info: dict[str, Any]) -> Entry:
    """Convert an fsspec info dictionary, whose keys differ between file systems, to an `Entry`."""
    modified = next((info[key] for key in MODIFIED_KEYS if info.get(key)), 0)
    if isinstance(modified, str):
        modified = datetime.fromisoformat(modified)
    seconds = modified.timestamp() if isinstance(modified, datetime) else float(modified)
    etag = next((info[key] for key in ("ETag", "etag", "md5") if info.get(key)), seconds)
    return Entry(int(info["size"]), f"{info['size']}-{etag}", seconds)
