"""Compute projections of text latents on a worker, from a sample of the job's captions."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from precompute.encode.recipe import Recipe, SourceRoot
from precompute.encode.towers import TextTowers
from precompute.encode.worker import check_source, device_settings, load_texts, new_captions, scratch_of_process
from precompute.input.captions import read_captions
from precompute.input.reject import Reject
from precompute.input.table import with_tables
from precompute.input.unit import Unit
from shards.base.device import is_accelerator
from shards.base.errors import DamagedInput
from shards.derive.part import present
from shards.derive.projection import sampled_parts
from shards.format.projection import AT_ONCE, CAPTIONS_PER_UNIT, Learner, Rows, sample_order
from shards.format.towers import Projection
from shards.open import open_store
from shards.root.reading import caption_of_each_source

Caption = tuple[str, str]
"""A caption's name, which is its sample's key and its place among the sample's captions, and its text."""


def learn_on_worker(
    units: Sequence[Unit],
    attempt: int,
    report: Callable[[int], None],
    recipe: Recipe,
    groups: Mapping[Rows, int],
    device: str,
    num_cpus: float,
    source: str,
) -> dict[str, Projection]:
    """Encode a keyed sample of a job's captions, and compute projections from them.

    Args:
        units: units of the input, in the order of `sample_order`; empty if the job has a source root.
        report: called with the number of captions encoded so far.
        recipe: the job's recipe, in which the towers of `groups` are unprojected.
        groups: towers that share a projection → number of dimensions.
        source: SHA-256 of the driver's source code.

    Raises:
        UnfitNode: this node has different code or models than the driver.
        RequestError: the captions span too few dimensions.
    """
    check_source(source)
    scratch_of_process(recipe.worker.scratch)
    torch.set_num_threads(1 if is_accelerator(device) else max(1, int(num_cpus)))
    encoding, worker = recipe.encoding, recipe.worker
    learner = Learner(encoding.texts, groups, device)
    towers = {name: encoding.texts[name] for name in learner.names}
    on = device_settings(encoding, torch.device(device), compiled=False, one_by_one=worker.one_by_one)
    texts = TextTowers(load_texts(towers, on), worker.batch_size, recipe.batch_sizes, worker.one_by_one)
    for captions in captions_of_root(recipe, recipe.source) if recipe.source else captions_of_units(units, recipe):
        groups_of_texts = [[text for _, text in captions[i : i + AT_ONCE]] for i in range(0, len(captions), AT_ONCE)]
        latents = [by_tower for wait in texts.start_groups(groups_of_texts) for by_tower, _ in wait()]
        learner.add([name for name, _ in captions], latents)
        report(learner.captions)
        if learner.is_full:
            break
    return learner.finish(texts.empty_caption())


def captions_of_units(units: Sequence[Unit], recipe: Recipe) -> Iterator[list[Caption]]:
    """Yield a keyed sample of each unit's captions. Damaged units are left out."""
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
        yield sampled(found)


def captions_of_root(recipe: Recipe, source: SourceRoot) -> Iterator[list[Caption]]:
    """Yield a keyed sample of the captions that a root's parts will have in the job's root."""
    record, how = source.conversion.source, source.conversion
    for samples in sampled_parts(open_store(source.place)):
        keys = [sample["key"] for sample in samples]
        stored = [caption_of_each_source(sample, record) for sample in samples]
        if how.has_new_captions:
            by_source = [
                {name: text for name, text in zip(record.captions, texts, strict=True) if text is not None}
                for texts in stored
            ]
            chosen = new_captions(keys, by_source, recipe.encoding, recipe.tables, Counter())
            stored = [[None if caption is None else caption[0] for caption in captions] for captions in chosen]
        named = zip(keys, stored, strict=True)
        yield sampled([(f"{key} {i}", text) for key, texts in named for i, text in enumerate(present(texts))])


def sampled(captions: Sequence[Caption]) -> list[Caption]:
    """Return a keyed sample of the captions of one unit."""
    by_name = dict(captions)
    return [(name, by_name[name]) for name in sample_order(by_name)[:CAPTIONS_PER_UNIT]]
