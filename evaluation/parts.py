"""Parts: files that one attempt writes and commits together. A part exists once its receipt exists.

    PLACE/pictures/00000.3fa9c1d2/…         the files, in a folder named by its content hash
    PLACE/receipts/pictures/00000.json      the receipt, created last

The functions that store these parts also commit the parts of a latents root (`shards/root/commit.py`), so the
guarantees are the same. The receipts are simpler than a root's, because they do not describe tars: they have no
buckets, bitmaps or generations, and the function that writes a part adds its own fields.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shards.base.config import flatten
from shards.base.durable import canonical_json, parse_sealed_json, sealed_json
from shards.base.errors import DamagedInput, RequestError
from shards.base.scratch import attempt_folder
from shards.base.store import Store
from shards.root.commit import content_hash, record_files, store_part

PartReceipt = dict[str, Any]
"""`part`: the part's folder; `files`: file name → SHA-256; `seconds`: time spent writing the files; and any fields that
the part's writer added."""
FOLDER = "receipts"


def read_receipts(store: Store, folder: str, names: Sequence[str]) -> dict[str, PartReceipt]:
    """Read the receipts of the parts `names` in `folder` in one batch. Uncommitted parts are omitted.

    Raises:
        DamagedFile: a receipt is damaged.
    """
    paths = {name: f"{FOLDER}/{folder}/{name}.json" for name in names}
    found = store.read_many(list(paths.values()))
    return {name: parse_sealed_json(found[path], store.where(path)) for name, path in paths.items() if path in found}


def commit_part(store: Store, folder: str, name: str, write: Callable[[Path], PartReceipt]) -> PartReceipt:
    """Write and commit a part unless it is already committed, and return its receipt.

    `write` writes the files into the given empty folder, and returns the fields to add to the receipt. If several
    attempts run concurrently, the first to create the receipt commits the part, and all of them return that receipt.
    """

    def store_files() -> PartReceipt:
        with attempt_folder(store, f"{folder}-{name}".replace("/", "-")) as private:
            part = private / "part"
            part.mkdir()
            started = time.monotonic()
            fields = write(part) | {"seconds": round(time.monotonic() - started, 3)}
            files = record_files(part, {})
            target = f"{folder}/{name}.{content_hash(files)}"
            store_part(store, part, target, files)
            return {**fields, "part": target, "files": {file: record.sha256 for file, record in files.items()}}

    return create_once(store, f"{FOLDER}/{folder}/{name}.json", store_files)


def seconds_of_parts(store: Store) -> float:
    """Return the total time, in seconds, that workers spent writing a store's committed parts."""
    receipts = store.read_many([f"{FOLDER}/{name}" for name in store.files(FOLDER)])
    return float(sum(parse_sealed_json(data, store.where(name)).get("seconds", 0) for name, data in receipts.items()))


def read_part(store: Store, receipt: PartReceipt) -> dict[str, bytes]:
    """Return a dict from file name to content for a committed part, in receipt order.

    Raises:
        DamagedInput: a file is missing, or its SHA-256 does not match the receipt.
    """
    paths = {file: f"{receipt['part']}/{file}" for file in receipt["files"]}
    found = store.read_many(list(paths.values()))
    for file, path in paths.items():
        if path not in found or hashlib.sha256(found[path]).hexdigest() != receipt["files"][file]:
            raise DamagedInput(
                f"{store.where(path)} is {'damaged' if path in found else 'missing'}. Restore it from a backup. "
                f"Alternatively, delete its folder and the folder's receipt in {store.where(FOLDER)}, then run the "
                f"same command again to recreate both."
            )
    return {file: found[path] for file, path in paths.items()}


def create_once(store: Store, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the sealed JSON at `name`, after creating it from `make()` if it does not exist.

    If several calls run concurrently, only one of them creates the file, and all of them return its content.

    Raises:
        DamagedFile: the file is damaged.
    """
    if (found := read_sealed(store, name)) is None:
        store.create(name, sealed_json(make()))
        found = read_sealed(store, name)
    assert found is not None
    return found


def check_same(store: Store, found: dict[str, Any], wanted: dict[str, Any], what: str, option: str) -> None:
    """Check that the settings stored in a record are the requested ones.

    Args:
        what: noun phrase for the location's content.
        option: option that sets the location.

    Raises:
        RequestError: some settings differ.
    """
    stored, requested = flatten(found), flatten(json.loads(canonical_json(wanted)))
    differences = [
        f"{key}: {_shorten(stored.get(key))} ≠ {_shorten(requested.get(key))}"
        for key in sorted(stored.keys() | requested.keys())
        if (key in stored, stored.get(key)) != (key in requested, requested.get(key))
    ]
    if differences:
        raise RequestError(
            f"{store.where()} contains {what} with different settings: {'; '.join(differences)} (stored ≠ requested). "
            f"Set {option} to a different location, or use the stored settings."
        )


def _shorten(value: Any) -> str:
    """Format a setting for an error; a list, such as the names of thousands of tars, is reduced to its length."""
    return f"a list of {len(value)}" if isinstance(value, list) else repr(value)


def read_sealed(store: Store, name: str) -> dict[str, Any] | None:
    """Return the sealed JSON at `name`, or None if it does not exist.

    Raises:
        DamagedFile: the file is damaged.
    """
    try:
        return parse_sealed_json(store.read(name), store.where(name))
    except FileNotFoundError:
        return None
