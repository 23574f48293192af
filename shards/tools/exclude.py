"""`python -m shards exclude ROOT`: add an exclusion list of keys, URLs or image SHA-256s."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.base.errors import RequestError
from shards.base.store import Store
from shards.base.table import counted
from shards.format.encoding import EncodingRecord
from shards.format.tables import read_samples
from shards.root.exclusions import Exclusion, add_exclusion
from shards.root.manifest import current_ids, load_rows, read_index
from shards.root.segments import parts_of

NUM_READERS = 16


def exclude(store: Store, exclusion: Exclusion) -> str:
    """Add an exclusion list to a root. Return a text for the terminal that says what the list matches, and which of its
    values match nothing.

    The list also applies to parts that are written later. Raises RequestError if `store` is not a latents root, or if
    the list consists of keys and none of them exists.
    """
    EncodingRecord.load(store)
    is_matched = np.zeros(len(exclusion.values), bool)
    found = [_match(store, bucket, id, exclusion, is_matched) for bucket, id in current_ids(store).items()]
    if exclusion.kind == "url":  # only the most specific line that matches a sample was found
        hosts = covering_hosts(exclusion.values.filter(pa.array(is_matched)).to_pylist())
        is_matched |= np.asarray(pc.is_in(exclusion.values, pa.array(hosts, pa.string())))
    unmatched: list[str] = exclusion.values.filter(pa.array(~is_matched)).to_pylist()
    if exclusion.kind == "key" and not is_matched.any():
        raise RequestError(
            f"No sample of {store.where()} has {_examples(unmatched, 'the key', 'any of the keys')}, so nothing was "
            f"excluded. Look up keys with `python -m shards where {store.where()} KEY`. Only published parts are "
            f"searched: if a job has just encoded the samples, run `python -m shards index {store.where()}` first."
        )
    added = "Added" if add_exclusion(store, exclusion) else "Already present:"
    lines = [
        f"{added} exclusions/{exclusion.id}.txt ({counted(len(exclusion.values), 'line')}, matched by "
        f"{exclusion.kind}). latentmill's training runs skip these samples from now on; other readers do not.",
        *found,
    ]
    if unmatched:
        lines.append(
            f"No sample matches {_examples(unmatched, 'the line', 'any of the lines')}. Check the spelling. The list "
            f"also applies to parts that are written later."
        )
    return "\n".join(lines)


def covering_hosts(lines: Iterable[str]) -> set[str]:
    """Return the hosts that cover lines of an exclusion list (canonical URLs and hosts), and their parent domains."""
    names = (line.partition("/")[0].split(".") for line in lines)
    return {".".join(labels[start:]) for labels in names for start in range(len(labels))}


def _match(store: Store, bucket: str, id: str, exclusion: Exclusion, is_matched: NDArray[np.bool_]) -> str:
    """Return a line with the number of a list's matches in one bucket, and set `is_matched` for each value that has a
    match."""
    parts = parts_of(load_rows(store, id, read_index(store, bucket, id)))

    def match(part: np.void) -> NDArray[np.int64]:
        lines = exclusion.lines_of(read_samples(store, bucket, part, [exclusion.kind]))
        return lines[lines >= 0]

    samples = matched_parts = 0
    with ThreadPoolExecutor(NUM_READERS) as readers:
        for lines in readers.map(match, parts):
            is_matched[lines] = True
            samples += len(lines)
            matched_parts += len(lines) > 0
    return f"{bucket}: {counted(samples, 'sample')} in {matched_parts:,} of {counted(len(parts), 'part')}"


def _examples(values: list[str], one: str, several: str) -> str:
    """Format values for a message, as in `the key '00017'` or `any of the keys '1', '2', '3' and 14 more`."""
    if len(values) == 1:
        return f"{one} {values[0]!r}"
    more = f" and {len(values) - 3:,} more" if len(values) > 3 else ""
    return f"{several} {', '.join(map(repr, values[:3]))}{more}"
