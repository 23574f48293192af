"""Compute projections of text latents from the states that a root stores."""

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shards.base.durable import DamagedFile
from shards.base.errors import Preempted
from shards.base.store import Store
from shards.derive.conversion import Conversion
from shards.derive.part import check_part, text_latents
from shards.format.projection import (
    CAPTIONS_PER_PRODUCT,
    ProjectionBuilder,
    TowerGroup,
    captions_per_unit,
    hash_order,
)
from shards.format.receipts import active_parts
from shards.format.tables import SAMPLES_NAME
from shards.format.text import TextLatents, unpack_stored
from shards.format.towers import Projection
from shards.root.committed import list_commits, read_receipts
from shards.root.exclusions import exclusion_ids, load_exclusion
from shards.root.reading import captions, read_part
from shards.root.shared import load_uncond

STOPPED = "Stopped by a signal before the projection was computed. Nothing was written. Run the same command again."


def compute_from_root(
    source: Store,
    how: Conversion,
    groups: Mapping[TowerGroup, int],
    buckets: Container[str] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Projection]:
    """Compute projections from calibration captions of a root, a pseudo-random subset, using the stored states.

    Args:
        how: the conversion to the target, in which the towers of `groups` are unprojected.
        groups: group of towers → number of dimensions.
        buckets: the buckets to read; None: all.
        should_stop: asked before each sample.

    Raises:
        RequestError: the states span too few dimensions.
        Preempted: `should_stop` returned true.
    """
    builder = ProjectionBuilder(how.target.texts, groups)
    keys: list[str] = []
    latents: list[dict[str, TextLatents]] = []

    def flush() -> None:
        builder.add(keys, latents)
        keys.clear()
        latents.clear()

    for samples in calibration_samples(source, buckets):
        for sample, chosen in samples:
            if should_stop():
                raise Preempted(STOPPED)
            rows, texts = unpack_stored(sample), captions(sample, how.source)
            by_tower = {name: text_latents(name, how, texts, rows) for name in builder.names}
            for i in chosen:
                keys.append(f"{sample['key']} {i}")
                latents.append({name: found[i] for name, found in by_tower.items()})
            if len(keys) >= CAPTIONS_PER_PRODUCT:
                flush()
        flush()
        if builder.is_full:
            break
    projections = builder.finish(load_uncond(source))
    if should_stop():
        raise Preempted(STOPPED)
    return projections


def calibration_samples(
    source: Store, buckets: Container[str] | None
) -> Iterator[Iterator[tuple[dict[str, Any], list[int]]]]:
    """Yield, for each part, an iterator over a pseudo-random subset of its captions: samples, and the indices of their
    chosen captions. The subset and the order of the parts depend only on keys and names. Excluded samples and damaged
    parts are left out.

    Args:
        buckets: the buckets to read; None: all.
    """
    receipts = {
        f"{tar} {bucket}": name
        for (tar, bucket), name in active_parts(list_commits(source)).items()
        if buckets is None or bucket in buckets
    }
    excluded = [load_exclusion(source, id) for id in exclusion_ids(source)]
    for receipt in read_receipts(source, [receipts[name] for name in hash_order(receipts)]):
        with source.local(receipt.folder) as part:
            try:
                check_part(part, receipt)
            except DamagedFile:
                continue  # reported when the part is derived
            table = pq.read_table(part / SAMPLES_NAME)
            is_excluded = np.zeros(len(table), bool)
            for exclusion in excluded:
                is_excluded |= exclusion.hits(table)
            kept = table.filter(pa.array(~is_excluded)).select(["key", "captions"]).to_pylist()
            names = [f"{row['key']} {i}" for row in kept for i in range(row["captions"])]
            chosen: dict[str, list[int]] = {}
            for name in hash_order(names)[: captions_per_unit(len(receipts))]:
                key, _, index = name.rpartition(" ")
                chosen.setdefault(key, []).append(int(index))
            samples = (sample for sample in read_part(part) if sample["key"] in chosen)
            yield ((sample, sorted(chosen[sample["key"]])) for sample in samples)
