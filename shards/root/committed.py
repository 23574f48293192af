"""What is committed to a root: its receipts listed, loaded, and added up over the buckets of a tar."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shards.base.errors import RequestError
from shards.base.store import Store, read_each
from shards.format.receipts import FOLDER, Receipt, active_receipts, parse_name, parse_receipt
from shards.format.tables import TOO_SMALL


class Committed(NamedTuple):
    """A receipt, and where it was read."""

    name: str
    """Relative to the root."""
    etag: str
    """The object's own."""
    receipt: Receipt


def list_commits(store: Store) -> dict[str, str]:
    """Everything in commits/, tombstones too: name relative to the root → etag; one listing.

    `active_receipts` says which of them count.
    """
    return store.etags(FOLDER)


def committed_parts(store: Store) -> set[tuple[str, str]]:
    """(bucket, tar) of every part that has a receipt in force; by names alone."""
    return {parsed[:2] for name in active_receipts(list_commits(store)) if (parsed := parse_name(name))}


def load_commits(store: Store, etags: Mapping[str, str]) -> list[Committed]:
    """The receipts of these names, by name and bucket; read at once. What is not there is left out.

    Raises:
        DamagedFile, RequestError: as `parse_receipt`.
    """
    return [
        Committed(name, etags[name], parse_receipt(data, store.where(name)))
        for name, data in sorted(store.read_many(list(etags)).items())
    ]


def read_receipts(store: Store, names: Sequence[str]) -> Iterator[Receipt]:
    """Yield the receipts of these names, in their order, each parsed when it is its turn.

    Raises:
        DamagedFile, RequestError: as `parse_receipt`.
    """
    for name, data in read_each(store, names):
        yield parse_receipt(data, store.where(name))


def iter_receipts(store: Store) -> Iterator[Receipt]:
    """Yield the receipts in force, by tar and bucket.

    A large root has 158,000 of them, which would take 6 GB as objects: keep what you need from each, and not the
    receipt.

    Raises:
        DamagedFile, RequestError: as `parse_receipt`.
    """
    yield from read_receipts(store, by_tar_and_bucket(active_receipts(list_commits(store))))


def tar_of(name: str) -> str:
    """The tar of a receipt in force, by the receipt's name."""
    parsed = parse_name(name)
    assert parsed is not None
    return parsed[1]


def by_tar_and_bucket(names: Iterable[str]) -> list[str]:
    """Sort names of receipts by tar, and those of a tar by bucket and generation."""
    return sorted(names, key=lambda name: (tar_of(name), name))


@dataclass(frozen=True)
class TarBooks:
    """What one tar gave, over all of its buckets."""

    tar: str
    parts: dict[str, Receipt]
    """By bucket."""

    @property
    def samples_in(self) -> int:
        """Of the tar."""
        return next(iter(self.parts.values())).samples_in

    @cached_property
    def _stored(self) -> NDArray[np.bool_]:
        return np.logical_or.reduce([part.stored_samples for part in self.parts.values()])

    @property
    def encoded(self) -> int:
        """Samples in at least one bucket."""
        return int(self._stored.sum())

    @property
    def rejected(self) -> dict[str, int]:
        """Reason → samples that are in no bucket; the first bucket's that has a telling one."""
        left, counts = ~self._stored, Counter[str]()
        for bucket in sorted(self.parts):
            part, telling = self.parts[bucket], np.zeros(self.samples_in, bool)
            for reason in part.rejects:
                rows = part.rejected_samples(reason) & left
                counts[reason] += int(rows.sum())
                telling |= rows
            left = left & ~telling
        counts[TOO_SMALL] += int(left.sum())
        return {reason: count for reason, count in sorted(counts.items()) if count}


def rejected_once(parts: Iterable[Receipt]) -> dict[str, int]:
    """Count a tar's samples that at least one of these `parts` rejects: reason → samples.

    A sample that several of its buckets reject for the same reason counts once.
    """
    rows: dict[str, NDArray[np.bool_]] = {}
    for part in parts:
        for reason in part.rejects:
            bits = part.rejected_samples(reason)
            rows[reason] = rows[reason] | bits if reason in rows else bits
    return {reason: int(bits.sum()) for reason, bits in rows.items()}


def by_tar(receipts: Iterable[Receipt]) -> list[TarBooks]:
    """Receipts in force → the books of each tar, by name."""
    parts: dict[str, dict[str, Receipt]] = {}
    for receipt in receipts:
        parts.setdefault(receipt.tar, {})[receipt.bucket] = receipt
    return [TarBooks(tar, parts[tar]) for tar in sorted(parts)]


def iter_books(store: Store) -> Iterator[TarBooks]:
    """Yield the books of every tar, by name, as `iter_receipts` does its receipts."""
    for tar, receipts in groupby(iter_receipts(store), key=lambda receipt: receipt.tar):
        yield TarBooks(tar, {receipt.bucket: receipt for receipt in receipts})


def iter_committed(store: Store) -> Iterator[TarBooks]:
    """Yield the books of every tar of a root that holds something.

    Raises:
        RequestError: nothing is committed to it; or as `parse_receipt`.
    """
    is_empty = True
    for books in iter_books(store):
        is_empty = False
        yield books
    if is_empty:
        raise RequestError(f"{store.where()} holds no committed shard yet: run `make precompute` first.")


def load_receipts(store: Store) -> list[Receipt]:
    """All receipts in force, by tar and bucket; only for small roots. Raises as `parse_receipt`."""
    return list(iter_receipts(store))


def load_books(store: Store) -> list[TarBooks]:
    """The books of every tar, by name; only for small roots. Raises as `parse_receipt`."""
    return list(iter_books(store))
