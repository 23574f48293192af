"""Folders of an object store, copied to this machine once, for all of its processes."""

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
def alone(name: str, cache: Path) -> Iterator[None]:
    """Inside, no other process of this machine fetches what has this name into `cache`."""
    if not os.access(next(folder for folder in (cache, *cache.parents) if folder.exists()), os.W_OK):
        yield  # filled before, and read-only: nothing is fetched into it
        return
    with locked(cache / f"{_id(name)}.lock"):
        yield


def newest_copy(address: str, cache: Path) -> Path | None:
    """What was fetched of a folder last, without asking the store; None where nothing was."""
    copies = [copy for copy in (cache / _id(address)).glob("*") if not copy.name.startswith(FETCHING)]
    return max(copies, key=lambda copy: copy.stat().st_mtime, default=None)


def fetch_folder(address: str, patterns: Sequence[str], cache: Path) -> Path:
    """A copy in `cache` of the files directly in the folder at `address` whose names match; who calls is `alone`.

    A copy is whole or not there. It is told from others by what the store says of the files.

    Raises:
        Outage: the store or the way to it failed.
        RequestError: there are no such files.
    """
    from shards.base.remote import RemoteStore  # fsspec and its file systems, where they are needed

    store = RemoteStore(address)
    entries = store.listing()
    found = {name: entry for name, entry in entries.items() if any(fnmatch(name, pattern) for pattern in patterns)}
    if not found:
        raise RequestError(f"{address} has none of {', '.join(patterns[:3])}, …: it is no model's folder. Look for it.")
    top = cache / _id(address)
    copy = top / _id(canonical_json({name: [entry.bytes, entry.etag] for name, entry in found.items()}).decode())
    if copy.is_dir():
        return copy
    for left in top.glob(f"{FETCHING}*"):  # by who was killed
        shutil.rmtree(left)
    fetching = top / f"{FETCHING}-{uuid.uuid4().hex[:8]}"
    fetching.mkdir(parents=True)
    for name in found:
        store.get(name, fetching / name)
    return fetching.rename(copy)


def _id(text: str) -> str:
    return hashlib.sha256(text.rstrip("/").encode()).hexdigest()[:16]
