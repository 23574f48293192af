"""Keyed random numbers: the published test vectors, distributions, independence, and slots under every layout."""

import itertools

import numpy as np
import pytest
import torch
from streaming.base.partition import get_partitions

from train.draws import Draws, Purpose, global_slots, philox


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's kat_vectors for philox4x32, 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    words = philox(tuple(torch.tensor(word) for word in counter), key)  # type: ignore[arg-type]
    assert tuple(int(word) for word in words) == expected


def draws(seed: int = 1, step: int = 2, slots: range = range(512)) -> Draws:
    return Draws(seed, step, torch.tensor(slots))


def test_normals_are_standard_normal() -> None:
    values = draws().normal(Purpose.NOISE, (4, 16, 16)).flatten().double()
    n = len(values)
    assert abs(values.mean()) < 4 / n**0.5
    assert abs(values.var() - 1) < 4 * (2 / n) ** 0.5
    # Kolmogorov-Smirnov against the normal distribution; 1.95 / √n is exceeded once in a thousand
    cdf = torch.special.ndtr(values.sort().values)
    assert (cdf - (torch.arange(n) + 0.5) / n).abs().max() < 1.95 / n**0.5
    assert values.abs().max() > 4


def test_timesteps_are_uniform() -> None:
    values = torch.cat([draws(step=step).integers(Purpose.TIMESTEP, 1000) for step in range(40)])
    counts = torch.bincount(values // 100, minlength=10).double()
    expected = len(values) / 10
    assert values.min() >= 0 and values.max() < 1000 and len(counts) == 10
    assert ((counts - expected) ** 2 / expected).sum() < 27.9  # chi², 9 degrees of freedom, once in a thousand


@pytest.mark.parametrize("probability", [0.0, 0.1, 1.0])
def test_chance(probability: float) -> None:
    share = torch.cat([draws(step=step).chance(Purpose.CAPTION_DROPOUT, probability) for step in range(20)]).double()
    assert abs(share.mean() - probability) < 0.015 and (0 < probability < 1 or share.mean() == probability)


def test_every_part_of_the_key_matters() -> None:
    """Seed (both words), step (both words), slot and purpose each give unrelated numbers."""
    base = draws().normal(Purpose.NOISE, (8, 8))
    others = [
        draws(seed=2).normal(Purpose.NOISE, (8, 8)),
        draws(seed=1 + (1 << 32)).normal(Purpose.NOISE, (8, 8)),
        draws(step=3).normal(Purpose.NOISE, (8, 8)),
        draws(step=2 + (1 << 32)).normal(Purpose.NOISE, (8, 8)),
        draws(slots=range(512, 1024)).normal(Purpose.NOISE, (8, 8)),
        draws().normal(Purpose.POSTERIOR, (8, 8)),
    ]
    for other in others:
        correlation = (base * other).mean() * base.numel() ** 0.5
        assert abs(correlation) < 4


def test_a_slot_does_not_depend_on_who_draws_it() -> None:
    whole = draws(slots=range(16)).normal(Purpose.NOISE, (3, 5))
    for start, stop in [(0, 4), (5, 6), (12, 16)]:
        torch.testing.assert_close(
            draws(slots=range(start, stop)).normal(Purpose.NOISE, (3, 5)), whole[start:stop], rtol=0, atol=0
        )


@pytest.mark.parametrize("algorithm", ["relaxed", "orig"])
def test_slots_invert_how_streaming_deals_samples_out(algorithm: str) -> None:
    """The global order, put together by slots, is one and the same on every number of nodes, ranks and workers."""
    num_samples, global_batch, canonical_nodes = 96, 24, 4
    orders = []
    for nodes, ranks, workers in itertools.product([1, 2, 4], [1, 2, 3], [1, 2, 3]):
        world = nodes * ranks
        local = global_batch // world
        # ids: (nodes, ranks per node, workers, batches per worker, batch size)
        ids = get_partitions(algorithm, num_samples, canonical_nodes, nodes, ranks, workers, local)
        order = np.full((num_samples // global_batch, global_batch), -1)
        for rank in range(world):
            node, local_rank = divmod(rank, ranks)
            slots = global_slots(local, rank, world, ranks).numpy()
            # a loader takes its workers' batches in turn
            batches = ids[node, local_rank].transpose(1, 0, 2).reshape(-1, local)
            for number in range(len(order)):
                order[number, slots] = batches[number]
        assert sorted(order.flatten()) == list(range(num_samples))
        orders.append(order)
    for order in orders[1:]:
        np.testing.assert_array_equal(order, orders[0])
