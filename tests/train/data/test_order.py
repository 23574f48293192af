"""The order of samples: content of an epoch, independence of the layout of machines and of resumes, and shapes."""

import hashlib
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from train.data.draws import global_slots
from train.data.order import VERSION, Order, StreamOrder, choose_per_epoch, quotas

GLOBAL_BATCH = 24


def stream(
    num_files: int, samples: int, weight: float = 1.0, passing: float | None = None, first_file: int = 0
) -> StreamOrder:
    """Make a stream of files with 1 to `samples` samples each, a fraction of which passes a filter."""
    rng = np.random.default_rng([num_files, samples])
    sizes = rng.integers(1, samples + 1, num_files)
    starts = sizes.cumsum() - sizes
    mask, counts = None, sizes
    if passing is not None:
        bits = rng.random(sizes.sum()) < passing
        mask, counts = np.packbits(bits), np.add.reduceat(bits.astype(np.int64), starts)
    chosen = int(weight * counts.sum()) // GLOBAL_BATCH * GLOBAL_BATCH
    return StreamOrder(first_file, counts, starts, mask, chosen)


def make_order(*groups: list[StreamOrder], block: int = 16, seed: int = 7, shuffle: bool = True) -> Order:
    return Order(groups, GLOBAL_BATCH, num_canonical_nodes=4, block=block, seed=seed, shuffle=shuffle)


def batch(order: Order, step: int) -> list[tuple[int, int]]:
    """Return (file, row) of each sample of a global batch."""
    files, rows = order.samples(step, np.arange(GLOBAL_BATCH))
    return list(zip(files.tolist(), rows.tolist(), strict=True))


def epoch(order: Order, number: int) -> Counter[tuple[int, int]]:
    steps = range(number * order.steps_per_epoch, (number + 1) * order.steps_per_epoch)
    return Counter(itertools.chain.from_iterable(batch(order, step) for step in steps))


def passing_samples(*streams: StreamOrder) -> set[tuple[int, int]]:
    return {
        (each.first_file + file, int(row))
        for each in streams
        for file in range(len(each.counts))
        for row in each.rows(file)
    }


def test_rows_equal_the_bits_of_the_mask() -> None:
    each = stream(9, 30, passing=0.5)
    assert each.mask is not None
    bits = np.unpackbits(each.mask)
    stops = [*each.starts[1:].tolist(), len(bits)]
    for file, (start, stop) in enumerate(zip(each.starts.tolist(), stops, strict=True)):
        assert each.rows(file).tolist() == np.flatnonzero(bits[start:stop]).tolist()
        assert len(each.rows(file)) == each.counts[file]


def test_quotas_of_billions_do_not_overflow() -> None:
    assert quotas(np.array([5_000_000_000] * 2), 8_000_000_000, 0).tolist() == [4_000_000_000] * 2


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(sum),
    st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
)
def test_quotas_are_exact_in_sum_and_proportional(counts: list[int], share: float, offset: float) -> None:
    total = sum(counts)
    wanted = int(share * total)
    found = quotas(np.array(counts), wanted, int(offset * total))
    assert found.sum() == wanted
    assert all(
        abs(quota - wanted * count / total) < 1 and quota <= count for quota, count in zip(found, counts, strict=True)
    )


@pytest.mark.parametrize("passing", [None, 0.6])
@pytest.mark.parametrize("weight", [0.3, 1.0, 2.0, 2.5])
def test_an_epoch_makes_weight_passes_over_the_passing_samples(weight: float, passing: float | None) -> None:
    """Each passing sample occurs ⌊weight⌋ or ⌈weight⌉ times, no other one ever, and over several epochs all do."""
    each = stream(30, 40, weight, passing)
    order = make_order([each])
    allowed, seen = passing_samples(each), set()
    for number in range(12):
        counts = epoch(order, number)
        assert counts.total() == each.chosen
        assert set(counts) <= allowed
        # rounded down to whole global batches
        assert min(counts.values()) >= 1 and max(counts.values()) <= int(np.ceil(weight))
        short = sum(max(int(weight) - counts[sample], 0) for sample in allowed)
        assert short < GLOBAL_BATCH
        seen |= set(counts)
    assert len(seen) > 0.95 * len(allowed)


def test_epochs_seeds_and_blocks_change_the_order() -> None:
    order = make_order([stream(30, 40)])
    assert batch(order, 0) != batch(order, order.steps_per_epoch)
    assert batch(order, 0) != batch(make_order([stream(30, 40)], seed=8), 0)
    assert batch(order, 0) != batch(make_order([stream(30, 40)], block=32), 0)
    assert batch(order, 5) == batch(make_order([stream(30, 40)]), 5)


def test_without_shuffling_canonical_nodes_read_the_files_in_order() -> None:
    order = make_order([stream(30, 40)], shuffle=False)
    assert batch(order, 0) == batch(order, order.steps_per_epoch)
    node_0 = [sample for step in range(order.steps_per_epoch) for sample in batch(order, step)[::4]]
    assert node_0 == sorted(node_0) and len(set(node_0)) == len(node_0)


def test_without_shuffling_streams_alternate_pass_by_pass() -> None:
    several = [stream(9, 20, 2.5), stream(7, 30, 1.4, passing=0.7, first_file=9)]
    order = make_order(several, shuffle=False)
    first, second = (sorted(passing_samples(each)) for each in several)
    sequence = [*first, *second, *first, *second[: several[1].chosen % len(second)]]
    sequence += first[: several[0].chosen % len(first)]
    batches = [batch(order, step) for step in range(order.steps_per_epoch)]
    assert [sample for node in range(4) for samples in batches for sample in samples[node::4]] == sequence


def test_the_order_of_a_version_never_changes() -> None:
    """A different order would make a resumed run repeat some samples and miss others, so it needs a new VERSION."""
    counts = np.arange(1, 40) * 7 % 23 + 1
    starts = counts.cumsum() - counts
    bits = np.arange(counts.sum()) * 5 % 7 < 4
    some = np.add.reduceat(bits.astype(np.int64), starts)
    streams = [StreamOrder(0, counts, starts, None, 720), StreamOrder(39, some, starts, np.packbits(bits), 96)]
    for groups, expected in (([streams], "cf6e40aba72048d0"), ([[each] for each in streams], "c67cf7cf58cb7235")):
        order = make_order(*groups)
        samples = [batch(order, step) for step in range(2 * order.steps_per_epoch)]
        assert VERSION == 2 and hashlib.sha256(str(samples).encode()).hexdigest()[:16] == expected


def test_a_global_batch_mixes_many_files_but_a_machine_reads_few() -> None:
    """With 4 canonical nodes on 4 machines, each machine reads a quarter of the files."""
    each = stream(200, 10)
    order = make_order([each], block=64)
    slots = np.arange(GLOBAL_BATCH)
    per_machine: list[set[int]] = [set() for _ in range(4)]
    num_files = []
    for step in range(order.steps_per_epoch):
        files, _ = order.samples(step, slots)
        num_files.append(len(set(files.tolist())))
        for machine in range(4):
            per_machine[machine] |= set(files[slots % 4 == machine].tolist())
    assert np.mean(num_files) > GLOBAL_BATCH / 2
    for one, other in itertools.combinations(per_machine, 2):
        assert len(one & other) <= 2  # files at a boundary
    assert sum(map(len, per_machine)) <= 200 + 3


def test_blocks_end_at_different_steps() -> None:
    """The canonical nodes reach new files at different steps."""
    each = stream(400, 10)
    order = make_order([each], block=64)
    length = each.chosen // 4
    firsts = []
    for node in range(4):
        start, files, _ = order._make_block(0, 0, node, 1)
        assert 0 < start < length and len(files) == 64
        firsts.append(start)
    assert len(set(firsts)) == 4


LAYOUTS = [(nodes, ranks) for nodes in (1, 2, 4) for ranks in (1, 2, 3) if GLOBAL_BATCH % (nodes * ranks) == 0]


def assembled(order: Order, step: int, num_nodes: int, ranks_per_node: int) -> NDArray[np.int64]:
    """Return the (slots, 2) global batch assembled from the shares that each rank computes on its own."""
    world = num_nodes * ranks_per_node
    whole = np.full((GLOBAL_BATCH, 2), -1)
    for rank in range(world):
        slots = global_slots(GLOBAL_BATCH // world, rank, world, ranks_per_node).numpy()
        whole[slots] = np.stack(order.samples(step, slots), axis=1)
    return whole


def three_shapes() -> list[list[StreamOrder]]:
    """Three aspect buckets of odd sizes and weights; one is filtered and spread over two roots."""
    wide, square = stream(17, 23, weight=1.7), stream(31, 19, weight=0.6, first_file=17)
    tall = stream(13, 29, passing=0.7, first_file=48)
    second = stream(7, 31, weight=3.0, first_file=61)
    return [[wide], [square, second], [tall]]


@pytest.mark.parametrize("shapes", [1, 3])
def test_the_order_is_the_same_on_every_layout_and_from_every_step(shapes: int) -> None:
    """Global batches do not depend on the number of nodes and ranks, nor on the step at which a run starts."""
    groups = three_shapes() if shapes == 3 else [[stream(31, 19, weight=1.3, passing=0.6)]]
    order = make_order(*groups)
    for step in range(2 * order.steps_per_epoch + 3):
        expected = np.array(batch(order, step))
        for nodes, ranks in LAYOUTS:
            np.testing.assert_array_equal(assembled(order, step, nodes, ranks), expected)
        np.testing.assert_array_equal(np.array(batch(make_order(*groups), step)), expected)


def test_a_global_batch_has_a_single_shape() -> None:
    groups = three_shapes()
    order = make_order(*groups)
    shape_of = {first: group for group, streams in enumerate(groups) for first in [each.first_file for each in streams]}
    firsts = np.array(sorted(shape_of))
    origins = []
    for step in range(order.steps_per_epoch):
        files, _ = order.samples(step, np.arange(GLOBAL_BATCH))
        shapes = {shape_of[int(first)] for first in firsts[np.searchsorted(firsts, files, side="right") - 1]}
        assert len(shapes) == 1
        origins.append(shapes.pop())
    assert Counter(origins) == {
        group: sum(each.chosen for each in streams) // GLOBAL_BATCH for group, streams in enumerate(groups)
    }
    assert origins != sorted(origins)  # interleaved
    counts = epoch(order, 0)
    assert set(counts) <= passing_samples(*itertools.chain.from_iterable(groups))
    wide, square = groups[0][0], groups[1][0]
    assert max(counts[sample] for sample in passing_samples(wide)) == 2
    assert max(counts[sample] for sample in passing_samples(square)) == 1


@settings(max_examples=30)
@given(
    num_files=st.integers(1, 12),
    samples=st.integers(GLOBAL_BATCH, 60),
    weight=st.floats(1, 3),
    block=st.integers(1, 200),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_sizes(num_files: int, samples: int, weight: float, block: int, seed: int) -> None:
    each = stream(num_files, samples, weight)
    if not each.chosen:
        return
    counts = epoch(make_order([each], block=block, seed=seed), 3)
    assert counts.total() == each.chosen and set(counts) <= passing_samples(each)
    assert max(counts.values()) <= int(np.ceil(weight))


@pytest.mark.parametrize(("weight", "expected"), [(0.29, 29), (0.07, 7), (1.1, 110), (3.0, 300), (0.295, 29)])
def test_a_weight_is_exact_as_written(weight: float, expected: int) -> None:
    assert choose_per_epoch(weight, 100, 1) == expected
