"""Which samples of a stream a run trains on, planned from the parts' small tables before a latent is read."""

import hashlib
import io
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field, model_validator

from shards.base.config import Config
from shards.base.durable import DamagedFile
from shards.base.errors import RequestError
from shards.base.store import Store
from shards.format.mds import MdsIndex
from shards.format.receipts import Receipt
from shards.format.tables import SAMPLES_NAME
from shards.root.committed import load_receipts

NUM_READERS = 16
"""Tables read at once: where a root is far away, the round trip counts."""
MISSING = "missing"
FILES_AT_ONCE = 1024


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
    """The samples of a stream that pass its filter."""

    mask: NDArray[np.uint8]
    """A bit per sample of the stream, in the index's order, eight to a byte."""
    counts: NDArray[np.int64]
    """(files,) how many of each MDS file pass."""
    dropped: dict[str, int]
    """Rule → how many fail it; a sample can fail several."""

    @property
    def sha256(self) -> str:
        """Over the mask: two selections of one stream are the same if these are."""
        return hashlib.sha256(self.mask.tobytes()).hexdigest()

    def explain(self) -> str:
        """The counts, for people."""
        rules = ", ".join(f"{rule} {count:,}" for rule, count in sorted(self.dropped.items()))
        return f"failed, by rule: {rules or 'none'}"


def select(store: Store, bucket: str, files: MdsIndex, config: FilterConfig) -> Selection:
    """Hold every part's table, which its receipt vouches for, against the bounds.

    Raises:
        DamagedFile: a table is not the one that its receipt recorded, or has not the part's number of samples.
        RequestError: a part has no receipt or no table.
    """
    parts, receipts = list(parts_of(files)), receipts_of(store, bucket)
    with ThreadPoolExecutor(NUM_READERS) as readers:
        found = list(
            readers.map(lambda part: select_part(store, receipts.get(part[0]), part[0], part[1], config), parts)
        )
    passing = np.concatenate([rows for rows, _ in found]) if found else np.zeros(0, bool)
    return Selection(
        mask=np.packbits(passing),
        counts=count_by_file(passing, files.samples),
        dropped=dict(sum((rules for _, rules in found), Counter[str]())),
    )


def count_by_file(passing: NDArray[np.bool_], samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """(files,) how many of each file's samples pass; `samples`, (files,), says how many there are of each."""
    holding, ends = np.flatnonzero(samples), samples.cumsum()
    starts, counts = ends - samples, np.zeros_like(samples)
    for first in range(0, len(holding), FILES_AT_ONCE):  # NumPy makes 8 bytes of each sample that it adds up
        files = holding[first : first + FILES_AT_ONCE]
        begin, end = starts[files[0]], ends[files[-1]]
        counts[files] = np.add.reduceat(passing[begin:end], starts[files] - begin, dtype=np.int64)
    return counts


def parts_of(files: MdsIndex) -> Iterator[tuple[str, int]]:
    """(part, samples) in the index's order; a part's files stand together."""
    part, samples = "", 0
    for index in range(len(files)):
        name = files.name(index).rpartition("/")[0]
        if name != part and part:
            yield part, samples
            samples = 0
        part, samples = name, samples + int(files.samples[index])
    if part:
        yield part, samples


def receipts_of(store: Store, bucket: str) -> dict[str, Receipt]:
    """Part → its receipt, of a bucket's."""
    return {receipt.part: receipt for receipt in load_receipts(store) if receipt.bucket == bucket}


def select_part(
    store: Store, receipt: Receipt | None, part: str, num_samples: int, config: FilterConfig
) -> tuple[NDArray[np.bool_], Counter[str]]:
    """(num_samples,) which of a part's samples pass, and how many fail each rule."""
    name = f"{receipt.folder if receipt else part}/{SAMPLES_NAME}"
    try:
        data = store.read(name)
    except FileNotFoundError:
        data = None
    if data is None or receipt is None:
        raise RequestError(
            f"{store.where(name)} or its receipt is missing, and the stream's filter needs it. Restore it from a copy."
        )
    if hashlib.sha256(data).hexdigest() != receipt.files[SAMPLES_NAME].sha256:
        raise DamagedFile(f"{store.where(name)} is damaged: its SHA-256 is not the one in its receipt. Restore it.")
    bounds = config.bounds
    table = pq.read_table(io.BytesIO(data), columns=list(bounds) or ["key"], use_threads=False)
    if len(table) != num_samples:
        raise DamagedFile(f"{store.where(name)} has {len(table)} rows; the index says {num_samples} samples.")
    passing = np.ones(num_samples, bool)
    failed: Counter[str] = Counter()
    for column, bound in bounds.items():
        values = table[column].to_numpy().astype(np.float32)
        for passes, rule in column_rules(column, values, bound, config.missing):
            passing &= passes
            failed[rule] += int((~passes).sum())
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
