"""Downloads folders from an object store into a cache shared by all processes on a machine."""

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from shards.base.durable import canonical_json, locked
from shards.base.errors import RequestError

FETCHING = ".fetching"


@contextmanager
def fetch_lock(name: str, cache: Path) -> Iterator[None]:
    """Keep other processes on this machine from fetching `name` into `cache`."""
    if not os.access(next(folder for folder in (cache, *cache.parents) if folder.exists()), os.W_OK):
        yield  # a read-only cache was filled beforehand, so nothing is fetched into it
        return
    with locked(cache / f"{_id(name)}.lock"):
        yield


def latest_copy(address: str, cache: Path) -> Path | None:
    """Return the most recently fetched copy of a folder, without contacting the store; None if there is no copy."""
    copies = [copy for copy in (cache / _id(address)).glob("*") if not copy.name.startswith(FETCHING)]
    return max(copies, key=lambda copy: copy.stat().st_mtime, default=None)


def fetch_folder(address: str, patterns: Sequence[str], cache: Path) -> Path:
    """Download the files at the top level of `address` that match `patterns`, and return their local folder.

    The caller must hold `fetch_lock`. A copy appears atomically, and its name is derived from the sizes and etags that
    the store reports, so a changed folder is fetched again.

    Raises:
        Outage: the store cannot be reached.
        RequestError: no file matches.
    """
    from shards.base.remote import RemoteStore  # deferred: imports fsspec and its file systems

    store = RemoteStore(address)
    entries = store.listing()
    found = {name: entry for name, entry in entries.items() if any(fnmatch(name, pattern) for pattern in patterns)}
    if not found:
        raise RequestError(
            f"{address} is not a model folder: it contains none of {', '.join(patterns)}. Check the URL."
        )
    top = cache / _id(address)
    copy = top / _id(canonical_json({name: [entry.bytes, entry.etag] for name, entry in found.items()}).decode())
    if copy.is_dir():
        return copy
    for abandoned in top.glob(f"{FETCHING}*"):  # left by killed processes
        shutil.rmtree(abandoned)
    fetching = top / f"{FETCHING}-{uuid.uuid4().hex[:8]}"
    fetching.mkdir(parents=True)
    for name in found:
        store.get(name, fetching / name)
    return fetching.rename(copy)


def _id(text: str) -> str:
    return hashlib.sha256(text.rstrip("/").encode()).hexdigest()[:16]
