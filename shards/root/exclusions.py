"""Exclusion lists: samples that later training runs must skip, for example after takedown or licence requests.

    ROOT/exclusions/url.SHA256.txt      sorted lines of URLs and hosts in canonical form
    ROOT/exclusions/key.SHA256.txt      sorted keys
    ROOT/exclusions/sha256.SHA256.txt   sorted SHA-256s of image files

Lists are immutable: they are added, but never changed or removed. A run applies the lists that exist when it starts,
and its fingerprint names them. The stored samples are not modified.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.base.errors import RequestError
from shards.base.opt_outs import OptOuts, matching_hosts, parse_entry
from shards.base.store import Store
from shards.base.urls import comparable_urls
from shards.format.tables import read_verified

FOLDER = "exclusions"
MAX_LISTED = 5
KINDS = {
    "key": "keys of samples",
    "url": "urls that the images were downloaded from, or hosts (including their subdomains)",
    "sha256": "hashes (SHA-256) of the image files",
}
"""Column of samples.parquet → description. The description's first word is also the name of the command-line option."""


@dataclass(frozen=True)
class Exclusion:
    """Exclusion list: values of one column. Samples with one of these values are excluded."""

    kind: str
    """Column of samples.parquet that the values are matched against: one of KINDS."""
    values: pa.Array

    @property
    def data(self) -> bytes:
        """Content of the stored file, one value per line."""
        return "".join(f"{value}\n" for value in self.values.to_pylist()).encode()

    @property
    def id(self) -> str:
        """Kind and SHA-256 of the content, in the form `url.SHA256`."""
        return f"{self.kind}.{hashlib.sha256(self.data).hexdigest()}"

    def hits(self, table: pa.Table) -> NDArray[np.bool_]:
        """Return the (rows,) bool mask of the excluded rows in a part's sample table."""
        return self.lines_of(table) >= 0

    def lines_of(self, table: pa.Table) -> NDArray[np.int64]:
        """Return a (rows,) array with the index in `values` of the line that excludes each sample, or -1 if no line
        does."""
        column = table[self.kind].combine_chunks()
        lines = np.full(len(column), -1, np.int64)
        is_present = np.asarray(column.is_valid())
        column = column.drop_null()
        found = pc.index_in(comparable_urls(column) if self.kind == "url" else column, self.values)
        hosts = self.values.filter(pc.invert(pc.match_substring(self.values, "/")))
        if self.kind == "url" and len(hosts):
            found = pc.coalesce(found, pc.index_in(matching_hosts(column, hosts.to_pylist()), self.values))
        lines[is_present] = np.asarray(found.fill_null(-1))
        return lines


def make_exclusion(kind: str, values: Iterable[str]) -> Exclusion:
    """Build an exclusion list from values; blank lines and duplicates are dropped.

    URLs and hosts are stored in canonical form, so that different spellings match. A host covers all URLs on that host
    and on its subdomains. URLs with schemes other than http and https are matched exactly as written. Raises
    RequestError if there are no values, if a value of kind `sha256` is not a SHA-256, or if a value of kind `url` is
    neither a URL nor a host.
    """
    assert kind in KINDS
    lines = {value.strip() for value in values} - {""}
    if kind == "url":
        lines = _canonical(lines)
    if kind == "sha256":
        lines = {line.lower() for line in lines}
        if wrong := [line for line in lines if len(line) != 64 or set(line) - set("0123456789abcdef")]:
            raise RequestError(
                f"{min(wrong)!r} is not a SHA-256 (64 hex digits). Nothing was excluded. Fix or remove this value."
            )
    if not lines:
        raise RequestError("No values to exclude were given. Pass values, or --file with one value per line.")
    return Exclusion(kind, pa.array(sorted(lines), pa.string()))


def _canonical(entries: set[str]) -> set[str]:
    """Convert URLs and hosts to the canonical form in which they are stored. A line without a slash is a host. Raises
    RequestError if an entry is neither."""
    found, invalid = OptOuts(), []
    for entry in sorted(entries):
        if re.match(r"(?!https?:)[a-z][a-z0-9+.-]*://", entry, re.IGNORECASE):
            found.urls.append(entry)
            continue
        try:
            parse_entry(entry, found)
        except ValueError as error:
            invalid.append(f"\n  {entry!r}: {error}")
    if invalid:
        more = f"\n  and {len(invalid) - MAX_LISTED} more" if len(invalid) > MAX_LISTED else ""
        raise RequestError(
            f"These entries name neither a URL nor a host:{''.join(invalid[:MAX_LISTED])}{more}\nNothing "
            f"was excluded. Fix or remove these entries."
        )
    return {*found.urls, *found.hosts}


def add_exclusion(store: Store, exclusion: Exclusion) -> bool:
    """Store an exclusion list; return False if the root already has it."""
    return store.create(f"{FOLDER}/{exclusion.id}.txt", exclusion.data)


def exclusion_ids(store: Store) -> list[str]:
    """Return the ids of all exclusion lists in a root, sorted."""
    return [name.removesuffix(".txt") for name in store.files(FOLDER) if name.partition(".")[0] in KINDS]


def load_exclusion(store: Store, id: str) -> Exclusion:
    """Load an exclusion list. Raises DamagedFile if it is missing or its content does not match its name."""
    kind, _, sha256 = id.partition(".")
    (data,) = read_verified(store, {f"{FOLDER}/{id}.txt": sha256})
    return Exclusion(kind, pa.array(data.decode().split("\n")[:-1], pa.string()))
