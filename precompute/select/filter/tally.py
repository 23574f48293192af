"""What the rows look like: histograms of sizes and scores, and samples per bucket. Tallies of parts add up."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from shards.format.buckets import Bucket

SIZE_BIN, NUM_SIZE_BINS = 64, 33  # pixels of the shorter side; the last bin is open: 2048 and more
SCORE_BIN, NUM_SCORE_BINS = 0.25, 41  # aesthetic score; the last bin is open: 10 and more


@dataclass
class Tally:
    """Counts over rows; rows without a size or a score are in `rows` alone."""

    rows: int = 0
    sizes: np.ndarray = field(default_factory=lambda: np.zeros(NUM_SIZE_BINS, np.int64))
    scores: np.ndarray = field(default_factory=lambda: np.zeros(NUM_SCORE_BINS, np.int64))
    buckets: dict[str, int] = field(default_factory=dict)

    def add(self, batch: pa.RecordBatch | pa.Table, buckets: Sequence[str]) -> None:
        """Count the rows of `batch`, whose columns are under our names."""
        self.rows += batch.num_rows
        self.buckets = {name: self.buckets.get(name, 0) for name in buckets}
        if {"WIDTH", "HEIGHT"} <= set(batch.schema.names):
            width, height = _numbers(batch, "WIDTH"), _numbers(batch, "HEIGHT")
            self.sizes += _histogram(np.minimum(width, height), SIZE_BIN, NUM_SIZE_BINS)
            for name in buckets:
                bucket = Bucket.parse(name)
                self.buckets[name] += int(np.count_nonzero((width >= bucket.width) & (height >= bucket.height)))
        if "AESTHETIC_SCORE" in batch.schema.names:
            self.scores += _histogram(_numbers(batch, "AESTHETIC_SCORE"), SCORE_BIN, NUM_SCORE_BINS)

    def __iadd__(self, other: "Tally") -> "Tally":
        self.rows += other.rows
        self.sizes += other.sizes
        self.scores += other.scores
        self.buckets = {n: self.buckets.get(n, 0) + other.buckets.get(n, 0) for n in self.buckets | other.buckets}
        return self

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"sizes": self.sizes.tolist(), "scores": self.scores.tolist()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Tally":
        return cls(value["rows"], np.array(value["sizes"]), np.array(value["scores"]), value["buckets"])


def _numbers(batch: pa.RecordBatch | pa.Table, name: str) -> np.ndarray:
    values = batch.column(name)
    return (values if isinstance(values, pa.Array) else values.combine_chunks()).to_numpy(zero_copy_only=False)


def _histogram(values: np.ndarray, width: float, num_bins: int) -> np.ndarray:
    """Counts of floor(value ÷ width), everything past the last bin in the last; NaN and negatives are left out."""
    if values.dtype.kind == "f":
        values = values[~np.isnan(values)]
    values = values[values >= 0]
    return np.bincount(np.minimum(values / width, num_bins - 1).astype(np.int64), minlength=num_bins)
