"""Which samples of a stream a run trains on, planned from the parts' small tables before a latent is read."""

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
from pydantic import Field, model_validator

from shards.base.config import Config
from shards.base.store import Store
from shards.format.mds import MdsIndex, mapped
from shards.root.exclusions import Exclusion, read_samples

NUM_READERS = 16
"""Tables read at once: where a root is far away, the round trip counts."""
MISSING = "missing"
EXCLUDED = "excluded"
FILES_AT_ONCE = 1024
PARTS_AT_ONCE = 1024


class Range(Config):
    """A bound, or two; both are inclusive, and compared in float32, in which scores are stored."""

    min: float | None = None
    """At or above."""
    max: float | None = None
    """At or below."""

    @model_validator(mode="after")
    def _check(self) -> "Range":
        if self.min is None and self.max is None:
            raise ValueError("give min or max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        return self

    @property
    def rules(self) -> list[tuple[np.ufunc, float, str]]:
        """(comparison, limit, `≥ 5`) for each bound that is set."""
        both = ((np.greater_equal, self.min, "≥"), (np.less_equal, self.max, "≤"))
        return [(compare, limit, f"{sign} {limit:g}") for compare, limit, sign in both if limit is not None]


class FilterConfig(Config):
    """Bounds on what stage 1 stored of each sample; a sample is trained on if it passes all of them."""

    width: Range | None = None
    """Of the original picture, in pixels."""
    height: Range | None = None
    aesthetic: Range | None = None
    similarity: Range | None = None
    punsafe: Range | None = None
    pwatermark: Range | None = None
    missing: Literal["drop", "keep"] = Field("drop")
    """What becomes of a sample without a score (NaN) that is bounded here: it fails that bound, or passes it."""

    @property
    def bounds(self) -> dict[str, Range]:
        """Column → bound, of those that are set."""
        return {name: bound for name, bound in self if isinstance(bound, Range)}

    def describe(self) -> str:
        """The bounds, for people."""
        rules = [f"{column} {rule}" for column, bound in self.bounds.items() for *_, rule in bound.rules]
        return f"{' and '.join(rules)} ({MISSING}: {self.missing})"


@dataclass(frozen=True, eq=False)
class Selection:
    """The samples of a stream that pass its filter, and that are not excluded."""

    mask: NDArray[np.uint8]
    """A bit per sample of the stream, in the index's order, eight to a byte."""
    counts: NDArray[np.int64]
    """(files,) how many of each MDS file pass."""
    dropped: dict[str, int]
    """Rule → how many fail it; a sample can fail several."""

    @property
    def sha256(self) -> str:
        """Over the mask: two selections of one stream are the same if these are."""
        return hashlib.sha256(self.mask.data).hexdigest()

    def explain(self) -> str:
        """The counts, for people."""
        rules = ", ".join(f"{rule} {count:,}" for rule, count in sorted(self.dropped.items()))
        return f"failed, by rule: {rules or 'none'}"

    def save(self, folder: Path) -> None:
        """Into a folder that is there."""
        np.save(folder / "mask.npy", self.mask)
        np.save(folder / "counts.npy", self.counts)
        (folder / "dropped.json").write_text(json.dumps(self.dropped))

    @classmethod
    def mapped(cls, folder: Path) -> "Selection":
        """One that was saved; in memory that all share who map it."""
        dropped = json.loads((folder / "dropped.json").read_text())
        return cls(mapped(folder, "mask"), mapped(folder, "counts"), dropped)


def select(
    store: Store, bucket: str, files: MdsIndex, config: FilterConfig, excluded: Sequence[Exclusion] = ()
) -> Selection:
    """Hold every part's table against the bounds, and against what is excluded.

    Raises:
        DamagedFile: a table is not the one that was committed, or has not the part's number of samples.
        RequestError: a part has no receipt or no table.
    """
    mask, counts, dropped = bytearray(), np.zeros(len(files), np.int64), Counter[str]()
    left = np.zeros(0, bool)
    """The last few samples, which do not fill a byte."""
    first = 0
    ends = files.samples.cumsum()
    with ThreadPoolExecutor(NUM_READERS) as readers:
        for start in range(0, len(files.parts), PARTS_AT_ONCE):  # a byte for each sample is held of so many parts alone
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
    """(files,) how many of each file's samples pass; `samples`, (files,), says how many there are of each."""
    holding, ends = np.flatnonzero(samples), samples.cumsum()
    starts, counts = ends - samples, np.zeros_like(samples)
    for first in range(0, len(holding), FILES_AT_ONCE):  # NumPy makes 8 bytes of each sample that it adds up
        files = holding[first : first + FILES_AT_ONCE]
        begin, end = starts[files[0]], ends[files[-1]]
        counts[files] = np.add.reduceat(passing[begin:end], starts[files] - begin, dtype=np.int64)
    return counts


def select_part(
    store: Store, bucket: str, part: np.void, config: FilterConfig, excluded: Sequence[Exclusion] = ()
) -> tuple[NDArray[np.bool_], Counter[str]]:
    """(samples,) which of a part's samples pass, and how many fail each rule; `part` is of `part_type`."""
    bounds = config.bounds
    table = read_samples(store, bucket, part, [*bounds, *(exclusion.kind for exclusion in excluded)])
    passing = np.ones(int(part["samples"]), bool)
    failed: Counter[str] = Counter()
    for column, bound in bounds.items():
        values = table[column].to_numpy().astype(np.float32)
        for passes, rule in column_rules(column, values, bound, config.missing):
            passing &= passes
            failed[rule] += int((~passes).sum())
    if excluded:  # a sample on several lists counts once
        hit = np.logical_or.reduce([exclusion.hits(table) for exclusion in excluded])
        passing &= ~hit
        failed[EXCLUDED] = int(hit.sum())
    return passing, failed


def column_rules(
    column: str, values: NDArray[np.float32], bound: Range, missing: str
) -> Iterator[tuple[NDArray[np.bool_], str]]:
    """(which values pass, rule) of each rule that the bound sets; a NaN is `missing`, and no other rule's business."""
    absent = np.isnan(values)
    for compare, limit, rule in bound.rules:
        yield absent | compare(values, np.float32(limit)), f"{column} {rule}"
    if missing == "drop":
        yield ~absent, f"{column} {MISSING}"
