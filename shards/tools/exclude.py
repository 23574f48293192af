"""`python -m shards exclude ROOT`: names samples on which no later run trains, by key, URL or the picture's SHA-256."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shards.base.store import Store
from shards.format.encoding import EncodingRecord
from shards.format.mds import parse_index
from shards.root.exclusions import Exclusion, add_exclusion, read_samples
from shards.root.manifest import current_ids, load_rows, read_index
from shards.root.segments import parts_of

NUM_READERS = 16


@dataclass(frozen=True)
class Matches:
    """What a list matches in one bucket."""

    bucket: str
    samples: int
    parts: int
    """That hold some of these."""
    blind_parts: int
    """Whose tables lack the column, so that nothing can be matched in them."""
    all_parts: int


def add_and_match(store: Store, exclusion: Exclusion) -> tuple[bool, list[Matches]]:
    """Add a list to a root; returns whether it is new, and what it matches now. Later parts are held against it too.

    Raises:
        RequestError: it is not a latents root.
    """
    EncodingRecord.load(store)
    is_new = add_exclusion(store, exclusion)
    buckets = [entry for entry in store.entries() if entry.partition("x")[0].isdigit()]
    return is_new, [_match(store, bucket, id, exclusion) for bucket, id in current_ids(store, buckets).items()]


def _match(store: Store, bucket: str, id: str, exclusion: Exclusion) -> Matches:
    parts = _parts(store, bucket, id)

    def match(part: np.void) -> tuple[int, bool]:
        table = read_samples(store, bucket, part, [exclusion.kind])
        return int(exclusion.hits(table).sum()), exclusion.kind not in table.column_names

    with ThreadPoolExecutor(NUM_READERS) as readers:
        found = list(readers.map(match, parts))
    return Matches(
        bucket=bucket,
        samples=sum(count for count, _ in found),
        parts=sum(count > 0 for count, _ in found),
        blind_parts=sum(blind for _, blind in found),
        all_parts=len(found),
    )


def _parts(store: Store, bucket: str, id: str) -> NDArray[np.void]:
    index = read_index(store, bucket, id)
    if isinstance(index, bytes):
        return parse_index(index, store.where(f"{bucket}/index.json")).parts
    return parts_of(load_rows(store, id, index))


def describe_matches(exclusion: Exclusion, is_new: bool, found: list[Matches]) -> str:
    lines = [
        f"{len(exclusion.values):,} lines, by {exclusion.kind}: exclusions/{exclusion.id}.txt"
        f"{'' if is_new else ', which was there already'}. Runs that begin from now on leave these samples out."
    ]
    for matches in found:
        lines.append(
            f"{matches.bucket}: {matches.samples:,} samples in {matches.parts:,} of {matches.all_parts:,} parts"
        )
        if matches.blind_parts:
            lines.append(
                f"    {matches.blind_parts:,} parts were written before tables held a {exclusion.kind}: nothing in "
                f"them can be matched by it. Exclude their samples by key."
            )
    return "\n".join(lines)
