"""Select a stream's samples by filters and exclusion lists, which reads the sample tables of its parts, not latents."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shards.base.config import Config
from shards.base.store import Store
from shards.format.mds import MdsIndex, mapped
from shards.format.scores import Range
from shards.format.tables import read_samples
from shards.root.exclusions import Exclusion

NUM_READERS = 16
"""Number of tables that are read concurrently, because latency dominates on a remote root."""
MISSING = "missing"
EXCLUDED = "excluded"
PARTS_AT_ONCE = 1024


class FilterConfig(Config, extra="allow"):
    """Bounds on the stored scores, and on the `width` and `height` of the original images in pixels, as in
    `aesthetic: {min: 5}`. The run trains only on samples within all bounds."""

    __pydantic_extra__: dict[str, Range | None]
    missing: Literal["drop", "keep"] = "drop"
    """Whether a sample without a score (NaN) fails (`drop`) or passes (`keep`) a bound on that score."""

    @property
    def bounds(self) -> dict[str, Range]:
        """The bounds, by column."""
        return {name: bound for name, bound in self if isinstance(bound, Range)}

    def describe(self) -> str:
        """Format the bounds for the model card."""
        rules = [f"{column} {rule}" for column, bound in self.bounds.items() for *_, rule in bound.rules]
        return f"{' and '.join(rules)} ({MISSING}: {self.missing})"


@dataclass(frozen=True, eq=False)
class Selection:
    """The samples of a stream that pass its filter and are not excluded."""

    mask: NDArray[np.uint8]
    """Packed bits, one per sample of the stream in the order of the index."""
    counts: NDArray[np.int64]
    """(files,) number of selected samples per MDS file."""
    dropped: dict[str, int]
    """Rule → number of samples that fail it. A sample can fail several rules."""

    @property
    def sha256(self) -> str:
        """Hash of the mask, which identifies a selection from a given stream."""
        return hashlib.sha256(self.mask.data).hexdigest()

    def explain(self) -> str:
        """Format the number of samples that fail each rule, for an error message."""
        rules = ", ".join(f"{rule} ({count:,})" for rule, count in sorted(self.dropped.items()))
        return f"Samples that fail, by rule: {rules or 'none'}"

    def save(self, folder: Path) -> None:
        """Write the selection to an existing folder."""
        np.save(folder / "mask.npy", self.mask)
        np.save(folder / "counts.npy", self.counts)
        (folder / "dropped.json").write_text(json.dumps(self.dropped))

    @classmethod
    def mapped(cls, folder: Path) -> "Selection":
        """Memory-map a saved selection, so that all processes share the memory."""
        dropped = json.loads((folder / "dropped.json").read_text())
        return cls(mapped(folder, "mask"), mapped(folder, "counts"), dropped)


def select(
    store: Store, bucket: str, files: MdsIndex, config: FilterConfig, excluded: Sequence[Exclusion] = ()
) -> Selection:
    """Apply a filter and exclusion lists to the tables of all parts.

    Raises:
        DamagedFile: a table is missing, does not match its receipt, or has the wrong number of rows.
    """
    mask, counts, dropped = bytearray(), np.zeros(len(files), np.int64), Counter[str]()
    left = np.zeros(0, bool)
    """Whether the last few samples pass, which do not fill a byte of the mask yet."""
    first = 0
    ends = files.samples.cumsum()
    with ThreadPoolExecutor(NUM_READERS) as readers:
        # in blocks, because the unpacked mask takes a byte per sample
        for start in range(0, len(files.parts), PARTS_AT_ONCE):
            block = files.parts[start : start + PARTS_AT_ONCE]
            found = list(readers.map(lambda part: select_part(store, bucket, part, config, excluded), block))
            passing = np.concatenate([rows for rows, _ in found])
            begin = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, begin + len(passing), side="right"))
            counts[first:last] = count_by_file(passing, files.samples[first:last])
            dropped += sum((rules for _, rules in found), Counter[str]())
            left = np.concatenate([left, passing])
            whole = len(left) // 8 * 8
            mask += np.packbits(left[:whole]).tobytes()
            left, first = left[whole:], last
    mask += np.packbits(left).tobytes()
    return Selection(np.frombuffer(mask, np.uint8), counts, dict(dropped))


def count_by_file(passing: NDArray[np.bool_], samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the passing samples in each file.

    Args:
        passing: whether each sample passes, in the order of the files.
        samples: (files,) total number of samples in each file.
    """
    # (files,) number of passing samples before the end of each file
    totals = np.searchsorted(np.flatnonzero(passing), samples.cumsum())
    return np.diff(totals, prepend=0)


def select_part(
    store: Store, bucket: str, part: np.void, config: FilterConfig, excluded: Sequence[Exclusion]
) -> tuple[NDArray[np.bool_], Counter[str]]:
    """Return whether each sample of a part passes, (samples,), and the number of samples that fail each rule.

    Args:
        part: a record of dtype `part_type`.
    """
    bounds = config.bounds
    table = read_samples(store, bucket, part, [*bounds, *(exclusion.kind for exclusion in excluded)])
    passing = np.ones(int(part["samples"]), bool)
    failed: Counter[str] = Counter()
    for column, bound in bounds.items():
        values = table[column].to_numpy().astype(np.float32)
        for passes, rule in column_rules(column, values, bound, config.missing):
            passing &= passes
            failed[rule] += int((~passes).sum())
    if excluded:  # a sample on several lists is counted once
        hit = np.logical_or.reduce([exclusion.hits(table) for exclusion in excluded])
        passing &= ~hit
        failed[EXCLUDED] = int(hit.sum())
    return passing, failed


def column_rules(
    column: str, values: NDArray[np.float32], bound: Range, missing: str
) -> Iterator[tuple[NDArray[np.bool_], str]]:
    """Yield (mask of passing values, rule) for each rule of a bound.

    A missing value (NaN) fails only the rule about missing values.
    """
    absent = np.isnan(values)
    for compare, limit, rule in bound.rules:
        yield absent | compare(values, np.float32(limit)), f"{column} {rule}"
    if missing == "drop":
        yield ~absent, f"{column} {MISSING}"
