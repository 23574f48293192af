"""List and load a root's receipts, and aggregate them per tar.

A receipt is active if no tombstone recalls it and it has the latest generation.
"""

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
    """A loaded receipt with its object's name and ETag."""

    name: str
    """Path relative to the root."""
    etag: str
    """ETag of the receipt's object."""
    receipt: Receipt


def list_commits(store: Store) -> dict[str, str]:
    """List commits/ in one pass, including tombstones; return each name, relative to the root, with its ETag.

    `active_receipts` selects the active receipts.
    """
    return store.etags(FOLDER)


def committed_parts(store: Store) -> set[tuple[str, str]]:
    """Return (bucket, tar) for every part with an active receipt, from object names alone."""
    return {parsed[:2] for name in active_receipts(list_commits(store)) if (parsed := parse_name(name))}


def load_commits(store: Store, etags: Mapping[str, str]) -> list[Committed]:
    """Load these receipts into memory, sorted by name. Names that do not exist are skipped.

    Raises:
        DamagedFile, RequestError: see `parse_receipt`.
    """
    return [
        Committed(name, etags[name], parse_receipt(data, store.where(name)))
        for name, data in sorted(store.read_many(list(etags)).items())
    ]


def read_receipts(store: Store, names: Sequence[str]) -> Iterator[Receipt]:
    """Yield these receipts in the order of `names`, parsing one at a time.

    Raises:
        DamagedFile, RequestError: see `parse_receipt`.
    """
    for name, data in read_each(store, names):
        yield parse_receipt(data, store.where(name))


def iter_receipts(store: Store) -> Iterator[Receipt]:
    """Yield the active receipts, ordered by tar and bucket.

    A large root has 158,000 receipts, which take 6 GB as Python objects, so keep the fields you need rather than the
    receipts.

    Raises:
        DamagedFile, RequestError: see `parse_receipt`.
    """
    yield from read_receipts(store, by_tar_and_bucket(active_receipts(list_commits(store))))


def tar_of(name: str) -> str:
    """Return the tar that a receipt's name refers to."""
    parsed = parse_name(name)
    assert parsed is not None
    return parsed[1]


def by_tar_and_bucket(names: Iterable[str]) -> list[str]:
    """Sort receipt names by tar, then by bucket and generation."""
    return sorted(names, key=lambda name: (tar_of(name), name))


@dataclass(frozen=True)
class TarReceipts:
    """All receipts of one tar, with counts over its buckets."""

    tar: str
    parts: dict[str, Receipt]
    """Bucket → receipt."""

    @property
    def samples_in(self) -> int:
        """Number of samples in the tar."""
        return next(iter(self.parts.values())).samples_in

    @cached_property
    def _stored(self) -> NDArray[np.bool_]:
        return np.logical_or.reduce([part.stored_samples for part in self.parts.values()])

    @property
    def encoded(self) -> int:
        """Number of samples stored in at least one bucket."""
        return int(self._stored.sum())

    @property
    def rejected(self) -> dict[str, int]:
        """Reason → number of samples that no bucket stores.

        A sample is counted once, under the first reason other than size that one of its buckets records, or else as
        too small.
        """
        unexplained, counts = ~self._stored, Counter[str]()
        for bucket in sorted(self.parts):
            part, explained = self.parts[bucket], np.zeros(self.samples_in, bool)
            for reason in part.rejects:
                rows = part.rejected_samples(reason) & unexplained
                counts[reason] += int(rows.sum())
                explained |= rows
            unexplained = unexplained & ~explained
        counts[TOO_SMALL] += int(unexplained.sum())
        return {reason: count for reason, count in sorted(counts.items()) if count}


def rejected_once(parts: Iterable[Receipt]) -> dict[str, int]:
    """Return, for each reason, how many of a tar's samples at least one of `parts` rejects for that reason.

    A sample that several buckets reject for the same reason counts once.
    """
    rows: dict[str, NDArray[np.bool_]] = {}
    for part in parts:
        for reason in part.rejects:
            bits = part.rejected_samples(reason)
            rows[reason] = rows[reason] | bits if reason in rows else bits
    return {reason: int(bits.sum()) for reason, bits in rows.items()}


def group_by_tar(receipts: Iterable[Receipt]) -> list[TarReceipts]:
    """Group active receipts by tar, ordered by tar name."""
    parts: dict[str, dict[str, Receipt]] = {}
    for receipt in receipts:
        parts.setdefault(receipt.tar, {})[receipt.bucket] = receipt
    return [TarReceipts(tar, parts[tar]) for tar in sorted(parts)]


def iter_tars(store: Store) -> Iterator[TarReceipts]:
    """Yield the receipts of one tar after another, ordered by tar name.

    Raises:
        DamagedFile, RequestError: see `parse_receipt`.
    """
    for tar, receipts in groupby(iter_receipts(store), key=lambda receipt: receipt.tar):
        yield TarReceipts(tar, {receipt.bucket: receipt for receipt in receipts})


def iter_committed_tars(store: Store) -> Iterator[TarReceipts]:
    """Yield the receipts of one tar after another, and fail if nothing has been committed.

    Raises:
        RequestError: the root has no active receipts; or see `parse_receipt`.
        DamagedFile: see `parse_receipt`.
    """
    is_empty = True
    for tar_receipts in iter_tars(store):
        is_empty = False
        yield tar_receipts
    if is_empty:
        raise RequestError(f"{store.where()} has no committed shards yet. Run `make precompute` first.")


def load_receipts(store: Store) -> list[Receipt]:
    """Load all active receipts, ordered by tar and bucket. Only for small roots. Raises the same errors as
    `parse_receipt`."""
    return list(iter_receipts(store))


def load_tars(store: Store) -> list[TarReceipts]:
    """Load the receipts of all tars, ordered by tar name. Only for small roots. Raises the same errors as
    `parse_receipt`."""
    return list(iter_tars(store))
