"""What rows look like, in counts that add up: by size, by score, and those large enough for a bucket."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from shards.format.buckets import Bucket

SIZE_BIN, NUM_SIZE_BINS = 64, 33  # pixels of the shorter side; the last bin is open: 2048 and more
SCORE_BIN, NUM_SCORE_BINS = 0.25, 41  # aesthetic score; the last bin is open: 10 and more


def tally(batch: pa.RecordBatch | pa.Table, buckets: Sequence[str]) -> Counter[str]:
    """Of the rows of `batch`, whose columns are under our names: all as `rows`, those in the third bin of sizes as
    `size 2`, of scores as `score 2`, and those large enough for a bucket under its name."""
    counts = Counter(rows=batch.num_rows)
    if {"WIDTH", "HEIGHT"} <= set(batch.schema.names):
        width, height = np.asarray(batch["WIDTH"]), np.asarray(batch["HEIGHT"])
        counts += _binned("size", np.minimum(width, height), SIZE_BIN, NUM_SIZE_BINS)
        for bucket in map(Bucket.parse, buckets):
            counts[str(bucket)] = int(np.count_nonzero((width >= bucket.width) & (height >= bucket.height)))
    if "AESTHETIC_SCORE" in batch.schema.names:
        counts += _binned("score", np.asarray(batch["AESTHETIC_SCORE"]), SCORE_BIN, NUM_SCORE_BINS)
    return counts


def _binned(name: str, values: np.ndarray, width: float, num_bins: int) -> Counter[str]:
    """Counts of floor(value ÷ width), everything past the last bin in the last; NaN and negatives are left out."""
    values = values[values >= 0]
    bins = np.bincount(np.minimum(values / width, num_bins - 1).astype(np.int64))
    return Counter({f"{name} {number}": count for number, count in enumerate(bins.tolist())})
