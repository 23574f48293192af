"""Compute projections of text latents on a worker, from calibration captions of the job."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from precompute.encode.recipe import Recipe, SourceRoot
from precompute.encode.towers import TextTowers
from precompute.encode.worker import device_settings, load_texts, renewed, set_up_attempt
from precompute.input.captions import read_captions
from precompute.input.reject import Reject
from precompute.input.table import with_tables
from precompute.input.unit import Unit
from shards.base.errors import DamagedInput
from shards.derive.part import present
from shards.derive.projection import calibration_samples
from shards.format.projection import CAPTIONS_PER_PRODUCT, ProjectionBuilder, TowerGroup, captions_per_unit, hash_order
from shards.format.towers import Projection
from shards.open import open_store
from shards.root.reading import caption_of_each_source

CAPTIONS_AT_ONCE = 4 * CAPTIONS_PER_PRODUCT
"""Number of captions whose states are in memory together: 1 GB for 512 tokens of T5-XXL."""
Caption = tuple[str, str]
"""(name, text) of a caption. The name is the sample's key and the caption's index."""


def compute_on_worker(
    units: Sequence[Unit],
    attempt: int,
    report: Callable[[int], None],
    recipe: Recipe,
    groups: Mapping[TowerGroup, int],
    device: str,
    num_cpus: float,
    source: str,
) -> dict[str, Projection]:
    """Encode calibration captions of a job, a pseudo-random subset, and compute projections from them.

    Args:
        units: units of the input, in the order of `hash_order`; empty if the job has a source root.
        report: called with the number of captions encoded so far.
        recipe: the job's recipe, in which the towers of `groups` are unprojected.
        groups: group of towers → number of dimensions.
        source: SHA-256 of the driver's source code.

    Raises:
        UnfitNode: this node has different code or models than the driver.
        RequestError: the captions span too few dimensions.
    """
    set_up_attempt(recipe, device, num_cpus, source)
    encoding, worker = recipe.encoding, recipe.worker
    builder = ProjectionBuilder(encoding.texts, groups, device)
    towers = {name: encoding.texts[name] for name in builder.names}
    on = device_settings(encoding, torch.device(device), compiled=False, one_by_one=worker.one_by_one)
    texts = TextTowers(load_texts(towers, on), worker.batch_size, recipe.batch_sizes, worker.one_by_one)
    for captions in captions_of_root(recipe, recipe.source) if recipe.source else captions_of_units(units, recipe):
        for first in range(0, len(captions), CAPTIONS_AT_ONCE):
            names, words = zip(*captions[first : first + CAPTIONS_AT_ONCE], strict=True)
            starts = range(0, len(words), CAPTIONS_PER_PRODUCT)
            batches = [list(words[i : i + CAPTIONS_PER_PRODUCT]) for i in starts]
            latents = [by_tower for wait in texts.start_groups(batches) for by_tower, _ in wait()]
            builder.add(names, latents)
            report(builder.captions)
        if builder.is_full:
            break
    return builder.finish(texts.empty_caption())


def captions_of_units(units: Sequence[Unit], recipe: Recipe) -> Iterator[list[Caption]]:
    """Yield a pseudo-random subset of each unit's captions. Damaged units are left out."""
    for unit in units:
        found: list[Caption] = []
        try:
            with unit.open(recipe.limits.max_bytes, "salvage") as source:
                for raw in with_tables(source.samples(), recipe.tables):
                    try:
                        captions = read_captions(raw, recipe.encoding.captions, recipe.encoding.max_characters)
                    except Reject:
                        continue
                    found += [(f"{raw.key} {i}", caption.text) for i, caption in enumerate(captions) if caption]
        except DamagedInput:
            continue
        yield calibration_subset(found, len(units))


def captions_of_root(recipe: Recipe, source: SourceRoot) -> Iterator[list[Caption]]:
    """Yield a pseudo-random subset of each part's captions in the source root, after replacement by new captions."""
    record, how = source.conversion.source, source.conversion
    buckets = {str(bucket) for bucket in recipe.buckets.all}
    for samples in calibration_samples(open_store(source.place), buckets):
        captions: list[Caption] = []
        keys, by_source = [], []
        for sample, chosen in samples:
            stored = caption_of_each_source(sample, record)
            if how.has_new_captions:
                named = zip(record.captions, stored, strict=True)
                keys.append(sample["key"])
                by_source.append({name: text for name, text in named if text is not None})
            else:
                captions += [(f"{sample['key']} {i}", present(stored)[i]) for i in chosen]
        if how.has_new_captions:
            new = renewed(keys, by_source, [{}] * len(keys), recipe.encoding, recipe.tables, Counter())
            for key, (found, _) in zip(keys, new, strict=True):
                captions += [(f"{key} {i}", caption[0]) for i, caption in enumerate(found) if caption is not None]
        yield captions


def calibration_subset(captions: Sequence[Caption], num_units: int) -> list[Caption]:
    """Choose calibration captions among those of one of `num_units` units, by the hashes of their names."""
    by_name = dict(captions)
    return [(name, by_name[name]) for name in hash_order(by_name)[: captions_per_unit(num_units)]]
