"""Compute projections of text latents from the states that a root stores."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shards.base.store import Store
from shards.derive.conversion import Conversion
from shards.derive.part import check_part, text_latents
from shards.format.projection import CAPTIONS_PER_UNIT, Learner, Rows, sample_order
from shards.format.receipts import active_parts
from shards.format.tables import SAMPLES_NAME
from shards.format.text import unpack_stored
from shards.format.towers import Projection
from shards.root.committed import list_commits, read_receipts
from shards.root.exclusions import exclusion_ids, load_exclusion
from shards.root.reading import captions, read_part
from shards.root.shared import load_uncond


def learn_from_root(source: Store, how: Conversion, groups: Mapping[Rows, int]) -> dict[str, Projection]:
    """Compute projections from a keyed sample of a root's captions, using the stored states.

    Args:
        how: the conversion to the target, in which the towers of `groups` are unprojected.
        groups: towers that share a projection → number of dimensions.

    Raises:
        RequestError: the sample spans too few dimensions.
        DamagedFile: a part does not match its receipt.
    """
    learner = Learner(how.target.texts, groups)
    for samples in sampled_parts(source):
        keys, latents = [], []
        for sample in samples:
            rows = unpack_stored(sample)
            texts = captions(sample, how.source)
            by_tower = {name: text_latents(name, how, texts, rows) for name in learner.names}
            keys += [sample["key"]] * len(rows)
            latents += [{name: found[i] for name, found in by_tower.items()} for i in range(len(rows))]
        learner.add(keys, latents)
        if learner.is_full:
            break
    return learner.finish(load_uncond(source))


def sampled_parts(source: Store) -> Iterator[list[dict[str, Any]]]:
    """Yield a keyed sample of the samples of each part, in an order that depends only on the parts' names. Excluded
    samples are left out. Raises DamagedFile if a part does not match its receipt."""
    receipts = {f"{tar} {bucket}": name for (tar, bucket), name in active_parts(list_commits(source)).items()}
    excluded = [load_exclusion(source, id) for id in exclusion_ids(source)]
    for receipt in read_receipts(source, [receipts[name] for name in sample_order(receipts)]):
        with source.local(receipt.folder) as part:
            check_part(part, receipt)
            table = pq.read_table(part / SAMPLES_NAME)
            is_excluded = np.zeros(len(table), bool)
            for exclusion in excluded:
                is_excluded |= exclusion.hits(table)
            keys = table["key"].filter(pa.array(~is_excluded)).to_pylist()
            chosen = set(sample_order(keys)[:CAPTIONS_PER_UNIT])
            yield [sample for sample in read_part(part) if sample["key"] in chosen]
