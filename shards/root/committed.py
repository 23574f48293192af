"""List and load a root's receipts, and aggregate them per tar.

A receipt is active if no tombstone recalls it and it has the latest generation.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from shards.base.errors import RequestError
from shards.base.store import Store, read_each
from shards.format.receipts import FOLDER, Receipt, active_parts, active_receipts, parse_receipt
from shards.format.tables import TOO_SMALL


def list_commits(store: Store) -> dict[str, str]:
    """List all receipts and tombstones in one pass. Return a dict from name, relative to the root, to ETag."""
    return {f"{FOLDER}/{name}": entry.etag for name, entry in store.listing(FOLDER).items()}


def committed_parts(store: Store) -> set[tuple[str, str]]:
    """Return (bucket, tar) for every part with an active receipt. No receipt is read, because the names suffice."""
    return {(bucket, tar) for tar, bucket in active_parts(list_commits(store))}


def read_receipts(store: Store, names: Sequence[str]) -> Iterator[Receipt]:
    """Yield these receipts in the order of `names`, parsing one at a time. Names that do not exist are skipped. Raises
    the same errors as `parse_receipt`."""
    for name, data in read_each(store, names):
        yield parse_receipt(data, store.where(name))


def iter_receipts(store: Store) -> Iterator[Receipt]:
    """Yield the active receipts, ordered by tar and bucket. Raises the same errors as `parse_receipt`.

    A large root has 158,000 receipts, which take 6 GB as Python objects, so keep the fields you need rather than the
    receipts.
    """
    yield from read_receipts(store, active_receipts(list_commits(store)))


@dataclass(frozen=True)
class TarReceipts:
    """Active receipts of one tar, with counts over all of its buckets."""

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

        A sample is counted once, under the first reason other than size that any of its buckets records. If there is no
        such reason, it is counted as too small.
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


def iter_tars(store: Store) -> Iterator[TarReceipts]:
    """Yield the active receipts tar by tar, ordered by tar name. Raises the same errors as `parse_receipt`."""
    for tar, receipts in groupby(iter_receipts(store), key=lambda receipt: receipt.tar):
        yield TarReceipts(tar, {receipt.bucket: receipt for receipt in receipts})


def iter_committed_tars(store: Store) -> Iterator[TarReceipts]:
    """Yield the active receipts tar by tar, like `iter_tars`, but raise RequestError if nothing has been committed."""
    is_empty = True
    for tar_receipts in iter_tars(store):
        is_empty = False
        yield tar_receipts
    if is_empty:
        raise RequestError(f"{store.where()} has no committed shards yet. Run `make precompute SHARD=all` first.")


def load_receipts(store: Store) -> list[Receipt]:
    """Load all active receipts, ordered by tar and bucket. Only for small roots; see `iter_receipts`."""
    return list(iter_receipts(store))
