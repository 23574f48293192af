"""`python -m shards exclude ROOT`: add an exclusion list of keys, URLs or image SHA-256s."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards.base.errors import RequestError
from shards.base.store import Store
from shards.format.encoding import EncodingRecord
from shards.root.exclusions import Exclusion, add_exclusion, read_samples
from shards.root.manifest import current_ids, load_rows, read_index
from shards.root.segments import parts_of

NUM_READERS = 16


@dataclass(frozen=True)
class Matches:
    """Number of samples and parts that an exclusion list matches in one bucket."""

    bucket: str
    samples: int
    parts: int
    """Parts with at least one matched sample."""
    all_parts: int


def add_and_match(store: Store, exclusion: Exclusion) -> tuple[bool, list[Matches], list[str]]:
    """Add an exclusion list to a root. It also applies to parts that are written later.

    Returns:
        Whether the list is new, its matches per bucket, and its values that match no published sample.

    Raises:
        RequestError: `store` is not a latents root; or the list consists of keys, none of which exists.
    """
    EncodingRecord.load(store)
    is_matched = np.zeros(len(exclusion.values), bool)
    found = [_match(store, bucket, id, exclusion, is_matched) for bucket, id in current_ids(store).items()]
    unmatched: list[str] = exclusion.values.filter(pa.array(~is_matched)).to_pylist()
    if exclusion.kind == "key" and not is_matched.any():
        raise RequestError(
            f"No sample of {store.where()} has {_examples(unmatched, 'the key', 'any of the keys')}, so nothing was "
            f"excluded. Look up keys with `python -m shards where {store.where()} KEY`. Only published parts are "
            f"searched: if a job has just encoded the samples, run `python -m shards index {store.where()}` first."
        )
    return add_exclusion(store, exclusion), found, unmatched


def _match(store: Store, bucket: str, id: str, exclusion: Exclusion, is_matched: NDArray[np.bool_]) -> Matches:
    """Match a list against one bucket, and set `is_matched` for each value with a match."""
    parts = _parts(store, bucket, id)

    def match(part: np.void) -> NDArray[np.int64]:
        lines = exclusion.lines_of(read_samples(store, bucket, part, [exclusion.kind]))
        return lines[lines >= 0]

    samples = matched_parts = 0
    with ThreadPoolExecutor(NUM_READERS) as readers:
        for lines in readers.map(match, parts):
            is_matched[lines] = True
            samples += len(lines)
            matched_parts += len(lines) > 0
    return Matches(bucket, samples, matched_parts, all_parts=len(parts))


def _examples(values: list[str], one: str, several: str) -> str:
    """Format values for a message, as in `the key '00017'` or `any of the keys '1', '2', '3' and 14 more`."""
    if len(values) == 1:
        return f"{one} {values[0]!r}"
    more = f" and {len(values) - 3:,} more" if len(values) > 3 else ""
    return f"{several} {', '.join(map(repr, values[:3]))}{more}"


def _parts(store: Store, bucket: str, id: str) -> NDArray[np.void]:
    return parts_of(load_rows(store, id, read_index(store, bucket, id)))


def describe_matches(exclusion: Exclusion, is_new: bool, found: list[Matches], unmatched: list[str]) -> str:
    """Format the results of `add_and_match` for the terminal."""
    lines = [
        f"{'Added' if is_new else 'Already present:'} exclusions/{exclusion.id}.txt ({len(exclusion.values):,} lines, "
        f"matched by {exclusion.kind}). Runs that start from now on skip these samples."
    ]
    for matches in found:
        lines.append(
            f"{matches.bucket}: {matches.samples:,} samples in {matches.parts:,} of {matches.all_parts:,} parts"
        )
    if unmatched:
        lines.append(
            f"No sample matches {_examples(unmatched, 'the line', 'the lines')}. Check the spelling. The list also "
            f"applies to parts that are written later."
        )
    return "\n".join(lines)
