"""List the files of an input folder, which may be local or at any URL. Latents roots inside the folder are skipped."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from precompute.input.unit import IMAGE_SUFFIXES
from shards.base.errors import Outage, RequestError
from shards.base.store import LocalStore, Store
from shards.format.encoding import FILE_NAME
from shards.open import open_store


@dataclass(frozen=True)
class Listing:
    """The files below a folder, without hidden ones and those of latents roots."""

    store: Store
    files: dict[str, int]
    """Path relative to the folder → size in bytes, sorted by path."""
    linked_folders: list[str] = field(default_factory=list)
    """Symbolic links to folders, which are not followed, because they may form a loop. Links to files are."""
    only: str = ""
    """Name of the file if the input is a single file rather than the folder."""

    @property
    def address(self) -> str:
        """Path or URL of the folder."""
        return self.store.where().rstrip("/")

    @property
    def given(self) -> str:
        """Path or URL of the input, for messages: the folder or the single file."""
        return self.store.where(self.only) if self.only else self.address


def list_input(address: str) -> Listing:
    """List an input: a folder, or a single file, which is treated like a folder that contains only this file. Raises
    RequestError if it does not exist, cannot be listed, or is a latents root."""
    folder, _, name = address.rstrip("/").rpartition("/")
    try:
        store = open_store(address)
        files, linked = _local_files(store.root) if isinstance(store, LocalStore) else (_remote_files(store), [])
        if name and (not files or (len(files) == 1 and next(iter(files)) in ("", address))):
            parent = open_store(folder or ("/" if address.startswith("/") else "."))
            if (size := parent.size(name)) is not None:
                return Listing(parent, {name: size}, only=name)
    except Outage as error:
        raise RequestError(f"The input {address} cannot be listed: {error}") from error
    except OSError as error:
        raise RequestError(
            f"The input {address} cannot be listed: {str(error).rstrip('.')}. Check the path and its permissions."
        ) from error
    if not files and isinstance(store, LocalStore) and not store.root.exists():
        raise RequestError(
            f"The `input` folder {address} does not exist. Set `input` to the folder of your images or tars, or to "
            f"the output of `make download`."
        )
    roots = tuple(name.removesuffix(FILE_NAME) for name in files if is_root(name, files))
    if "" in roots:
        raise RequestError(
            f"{address} is a latents root. To derive a new root from it, set `source` instead of `input`."
        )
    kept = {name: size for name, size in sorted(files.items()) if not (roots and name.startswith(roots))}
    return Listing(store, kept, sorted(linked))


def is_root(name: str, files: dict[str, int]) -> bool:
    """Return whether a file is the encoding.json of a latents root, rather than the JSON beside an image."""
    stem = name.removesuffix("json")
    return name.rpartition("/")[2] == FILE_NAME and not any(f"{stem}{suffix}" in files for suffix in IMAGE_SUFFIXES)


def is_hidden(name: str) -> bool:
    """Return whether a part of a path starts with a dot, or belongs to an archive made on a Mac."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _remote_files(store: Store) -> dict[str, int]:
    return {name: entry.bytes for name, entry in store.listing().items() if not is_hidden(name)}


def _local_files(root: Path) -> tuple[dict[str, int], list[str]]:
    files, linked, folders = {}, [], [(str(root), "")] if root.is_dir() else []
    while folders:
        folder, prefix = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = prefix + entry.name
                if is_hidden(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append((entry.path, f"{name}/"))
                elif entry.is_dir():
                    linked.append(name)
                elif entry.is_file():  # a dangling link is not a file, nor is a socket
                    files[name] = entry.stat().st_size
    return files, linked
