"""Parts: files that one attempt made and committed together. Only a part's receipt says that it exists."""

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shards.base.durable import canonical_json, parse_sealed_json, sealed_json
from shards.base.errors import DamagedInput
from shards.base.scratch import attempt_folder
from shards.base.store import Store
from shards.root.commit import content_hash, record_files, store_part

Receipt = dict[str, Any]
"""What the part's maker says of it, `part`: its folder, `files`: name → SHA-256, and `seconds` that making it took."""
FOLDER = "receipts"


def read_receipt(store: Store, folder: str, name: str) -> Receipt | None:
    """Of part `name` in `folder`; None where it is not committed.

    Raises:
        DamagedFile: the receipt is not as it was written.
    """
    return read_sealed(store, _receipt(folder, name))


def read_receipts(store: Store, folder: str, names: Sequence[str]) -> dict[str, Receipt]:
    """Read the receipts of parts `names` in `folder` in one batch; parts that are not committed are left out.

    Raises:
        DamagedFile: a receipt is not as it was written.
    """
    paths = {name: _receipt(folder, name) for name in names}
    found = store.read_many(list(paths.values()))
    return {name: parse_sealed_json(found[path], store.where(path)) for name, path in paths.items() if path in found}


def commit_part(store: Store, folder: str, name: str, make: Callable[[Path], Receipt]) -> Receipt:
    """The receipt of a part: `make` writes its files into a private folder, unless the part is committed already.

    As stage 1 commits: the part's folder is named by its content, and of two attempts at once the one that creates the
    receipt has made the part.
    """
    return create_once(store, _receipt(folder, name), lambda: _put(store, folder, name, make))


def _put(store: Store, folder: str, name: str, make: Callable[[Path], Receipt]) -> Receipt:
    with attempt_folder(store, f"{folder}-{name}".replace("/", "-")) as private:
        part = private / "part"
        part.mkdir()
        started = time.monotonic()
        about = make(part) | {"seconds": round(time.monotonic() - started, 3)}
        files = record_files(part, {})
        place_name = f"{folder}/{name}.{content_hash(files)}"
        store_part(store, part, place_name, files)
        return {**about, "part": place_name, "files": {file: record.sha256 for file, record in files.items()}}


def seconds_of_parts(store: Store) -> float:
    """That all committed parts of a store took, each on its worker."""
    receipts = store.read_many([f"{FOLDER}/{name}" for name in store.files(FOLDER)])
    return float(sum(parse_sealed_json(data, store.where(name)).get("seconds", 0) for name, data in receipts.items()))


def read_part(store: Store, receipt: Receipt) -> dict[str, bytes]:
    """A committed part's files by name, in the receipt's order.

    Raises:
        DamagedInput: a file is missing, or differs from what was committed.
    """
    folder = receipt["part"]
    found = store.read_many([f"{folder}/{file}" for file in receipt["files"]])
    files = {}
    for file, sha256 in receipt["files"].items():
        data = found.get(f"{folder}/{file}")
        if data is None or hashlib.sha256(data).hexdigest() != sha256:
            raise DamagedInput(
                f"{store.where(f'{folder}/{file}')} is {'missing' if data is None else 'damaged'}. Restore it from a "
                f"copy; or remove that folder and its receipt in {store.where(FOLDER)}, and the same command makes "
                f"that part again."
            )
        files[file] = data
    return files


def create_once(store: Store, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The sealed JSON at `name`, made where there is none; of two that make it at once, the first one's counts.

    Raises:
        DamagedFile: it is not as it was written.
    """
    if (found := read_sealed(store, name)) is None:
        store.create(name, sealed_json(make()))
        found = read_sealed(store, name)
    assert found is not None
    return found


def read_sealed(store: Store, name: str) -> dict[str, Any] | None:
    """The sealed JSON at `name`; None where there is none.

    Raises:
        DamagedFile: it is not as it was written.
    """
    try:
        return parse_sealed_json(store.read(name), store.where(name))
    except FileNotFoundError:
        return None


def write_once(
    store: Store, name: str, content: dict[str, Any], refusal: Callable[[dict[str, Any]], Exception]
) -> None:
    """Write `content` as sealed JSON where there is none yet; what is there must be the same, or `refusal` says why."""
    store.create(name, sealed_json(content))
    found = parse_sealed_json(store.read(name), store.where(name))
    if canonical_json(found) != canonical_json(content):
        raise refusal(found)


def _receipt(folder: str, name: str) -> str:
    return f"{FOLDER}/{folder}/{name}.json"
