"""Samples that no later run may train on: takedowns, licences. Lists that are added to a root and never changed.

    ROOT/exclusions/url.SHA256.txt      sorted lines; of keys, of URLs, or of SHA-256s of the pictures' files

A run applies all lists that were there when it began, and its fingerprint names them. Nothing stored is touched.
"""

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from shards.base.durable import DamagedFile
from shards.base.errors import RequestError
from shards.base.store import Store
from shards.format.tables import SAMPLES_NAME

FOLDER = "exclusions"
KINDS = {
    "key": "keys of samples",
    "url": "urls that the pictures were downloaded from",
    "sha256": "hashes, SHA-256, of the pictures' files",
}
"""Column of samples.parquet → what it holds."""


@dataclass(frozen=True)
class Exclusion:
    kind: str
    """The column of samples.parquet that it is about: one of KINDS."""
    values: pa.Array

    @property
    def data(self) -> bytes:
        return "".join(f"{value}\n" for value in self.values.to_pylist()).encode()

    @property
    def id(self) -> str:
        """`url.SHA256`."""
        return f"{self.kind}.{hashlib.sha256(self.data).hexdigest()}"

    def hits(self, table: pa.Table) -> NDArray[np.bool_]:
        """(rows,) which samples of a part are excluded."""
        return self.lines_of(table) >= 0

    def lines_of(self, table: pa.Table) -> NDArray[np.int64]:
        """(rows,) index into `values` of the line that excludes each sample; -1 where none does."""
        return np.asarray(pc.index_in(table[self.kind], self.values).fill_null(-1)).astype(np.int64)


def make_exclusion(kind: str, values: Iterable[str]) -> Exclusion:
    """A list of what is to be excluded; blank lines count for nothing.

    Raises:
        RequestError: there is nothing in it, or what stands there is no SHA-256.
    """
    assert kind in KINDS
    lines = {value.strip() for value in values} - {""}
    if kind == "sha256":
        lines = {line.lower() for line in lines}
        if wrong := [line for line in lines if len(line) != 64 or set(line) - set("0123456789abcdef")]:
            raise RequestError(f"{min(wrong)!r} is no SHA-256, which is 64 hex digits. Nothing was excluded.")
    if not lines:
        raise RequestError("Nothing to exclude was given. Give values, or a file with one on each line.")
    return Exclusion(kind, pa.array(sorted(lines), pa.string()))


def add_exclusion(store: Store, exclusion: Exclusion) -> bool:
    """Store a list; returns whether it was not there yet."""
    return store.create(f"{FOLDER}/{exclusion.id}.txt", exclusion.data)


def exclusion_ids(store: Store) -> list[str]:
    """Of all lists of a root, sorted."""
    return [name.removesuffix(".txt") for name in store.files(FOLDER) if name.partition(".")[0] in KINDS]


def load_exclusion(store: Store, id: str) -> Exclusion:
    """A list.

    Raises:
        DamagedFile: it is not there, or not what was stored.
    """
    name = f"{FOLDER}/{id}.txt"
    data = store.read_many([name]).get(name, b"")
    exclusion = Exclusion(id.partition(".")[0], pa.array(data.decode(errors="replace").split("\n")[:-1], pa.string()))
    if exclusion.id != id:
        raise DamagedFile(f"{store.where(name)} is missing or damaged: its SHA-256 is not its name. Restore it.")
    return exclusion


def damaged_exclusions(store: Store) -> Iterator[str]:
    """Lists that are not as they were stored."""
    for id in exclusion_ids(store):
        try:
            load_exclusion(store, id)
        except DamagedFile as error:
            yield str(error)


def read_samples(store: Store, bucket: str, part: np.void, columns: Sequence[str]) -> pa.Table:
    """Read `columns` and the keys of a part's table of samples, in order.

    Args:
        part: of `part_type`.

    Raises:
        DamagedFile: it is not the one that was committed, or has not the part's number of samples.
        RequestError: it is missing.
    """
    folder, expected = part["folder"].decode(), part["table"].decode()
    name = f"{bucket}/{folder}/{SAMPLES_NAME}"
    data = store.read_many([name]).get(name)
    if data is None:
        raise RequestError(f"{store.where(name)} is missing, and the stream's filter needs it. Restore it from a copy.")
    if hashlib.sha256(data).hexdigest() != expected:
        raise DamagedFile(f"{store.where(name)} is damaged: its SHA-256 is not the one in its receipt. Restore it.")
    table = pq.ParquetFile(io.BytesIO(data)).read([*dict.fromkeys(["key", *columns])], use_threads=False)
    if len(table) != part["samples"]:
        raise DamagedFile(f"{store.where(name)} has {len(table)} rows; the index says {part['samples']} samples.")
    return table
