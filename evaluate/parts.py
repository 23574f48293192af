"""Parts: files that one attempt made and committed together. Only a part's receipt says that it exists."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shards.base.durable import canonical_json, parse_sealed_json, sealed_json, sha256_file
from shards.base.errors import DamagedInput
from shards.base.store import Store
from shards.root.commit import attempt_folder

Receipt = dict[str, Any]
"""What the part's maker says of it, and `files`: name → SHA-256."""


def read_receipt(store: Store, folder: str, name: str) -> Receipt | None:
    """Of part `name` in `folder`; None where it is not committed.

    Raises:
        DamagedFile: the receipt is not as it was written.
    """
    try:
        return parse_sealed_json(store.read(_receipt(folder, name)), store.where(_receipt(folder, name)))
    except FileNotFoundError:
        return None


def commit_part(store: Store, folder: str, name: str, make: Callable[[Path], Receipt]) -> Receipt:
    """The receipt of a part: `make` writes its files into a private folder, unless the part is committed already.

    Of two attempts at once the second to end finds the first's receipt, and throws its own work away.
    """
    if (found := read_receipt(store, folder, name)) is not None:
        return found
    lock = f"{folder}-{name}".replace("/", "-")
    with attempt_folder(store, lock) as private:
        part = private / "part"
        part.mkdir()
        about = make(part)
        files = {path.relative_to(part).as_posix(): sha256_file(path) for path in sorted(part.rglob("*"))}
        with store.locked(lock) as still_held:
            if (found := read_receipt(store, folder, name)) is not None:
                return found
            store.put(part, f"{folder}/{name}")
            still_held()
            receipt = {**about, "files": files}
            store.write(_receipt(folder, name), sealed_json(receipt))
    return receipt


def read_part(store: Store, folder: str, name: str, receipt: Receipt) -> dict[str, bytes]:
    """A committed part's files by name, in the receipt's order.

    Raises:
        DamagedInput: a file is missing, or differs from what was committed.
    """
    found = store.read_many([f"{folder}/{name}/{file}" for file in receipt["files"]])
    files = {}
    for file, sha256 in receipt["files"].items():
        data = found.get(f"{folder}/{name}/{file}")
        if data is None or hashlib.sha256(data).hexdigest() != sha256:
            raise DamagedInput(
                f"{store.where(f'{folder}/{name}/{file}')} is {'missing' if data is None else 'damaged'}. Restore it "
                f"from a copy; or remove {store.where(_receipt(folder, name))}, and the same command makes that part "
                f"again."
            )
        files[file] = data
    return files


def write_once(
    store: Store, name: str, content: dict[str, Any], refusal: Callable[[dict[str, Any]], Exception]
) -> None:
    """Write `content` as sealed JSON where there is none yet; what is there must be the same, or `refusal` says why."""
    with store.locked(name):
        try:
            found = parse_sealed_json(store.read(name), store.where(name))
        except FileNotFoundError:
            store.write(name, sealed_json(content))
            return
    if canonical_json(found) != canonical_json(content):
        raise refusal(found)


def _receipt(folder: str, name: str) -> str:
    return f"receipts/{folder}/{name}.json"
