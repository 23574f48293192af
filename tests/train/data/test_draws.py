"""Keyed random numbers: published test vectors, distributions, independence, and slots for every layout of ranks."""

import math
from itertools import product

import pytest
import torch
from torch._inductor import metrics

from train.data.draws import Draws, Purpose, global_slots, philox

pytestmark = pytest.mark.heavy


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


def test_fused_kernels_give_the_same_draws() -> None:
    metrics.reset()
    counts = {Purpose.NOISE: 30, Purpose.TIMESTEP: 1}
    plain, fused = (Draws(2**40 + 7, 2**33 + 5, torch.arange(5), fused) for fused in (False, True))
    for made in (plain, fused):
        made.draw(counts)
    assert 1 <= metrics.generated_kernel_count <= 2
    assert all(fused.drawn[purpose].equal(plain.drawn[purpose]) for purpose in counts)


def test_the_counter_holds_block_slot_step_and_purpose_and_the_key_holds_the_seed() -> None:
    """A change would alter the loss curve of every run that is resumed."""
    found = Draws(7 << 32 | 5, 3 << 32 | 2, torch.tensor([11, 4])).words(Purpose.OFFSET_NOISE, 6)
    for row, slot in enumerate((11, 4)):
        rest = torch.tensor(slot), torch.tensor(2), torch.tensor(4 * 65536 + 3)
        blocks = [philox((torch.tensor(block), *rest), (5, 7)) for block in (0, 1)]
        assert found[row].tolist() == [int(word) for words in blocks for word in words][:6]


def test_the_smallest_word_gives_numbers_in_range() -> None:
    made = draws(slots=range(1))
    made.drawn = dict.fromkeys((Purpose.NOISE, Purpose.TIMESTEP), torch.zeros(1, 4, dtype=torch.int64))
    assert made.uniform(Purpose.TIMESTEP).item() == 2.0**-33 and not made.bernoulli(Purpose.TIMESTEP, 0.0, 1).any()
    # Box-Muller: √(-2 ln 2^-33) = 6.764
    assert made.normal(Purpose.NOISE, (4,)).abs().max().item() == pytest.approx(6.764, abs=1e-3)


def draws(seed: int = 1, step: int = 2, slots: range = range(512)) -> Draws:
    return Draws(seed, step, torch.tensor(slots))


def test_normals_are_standard_normal() -> None:
    values = draws().normal(Purpose.NOISE, (4, 16, 16)).flatten().double()
    n = len(values)
    assert abs(values.mean()) < 4 / n**0.5
    assert abs(values.var() - 1) < 4 * (2 / n) ** 0.5
    # Kolmogorov-Smirnov test against the normal distribution; p = 0.001 at 1.95 / √n
    cdf = torch.special.ndtr(values.sort().values)
    assert (cdf - (torch.arange(n) + 0.5) / n).abs().max() < 1.95 / n**0.5
    assert values.abs().max() > 4


def test_timesteps_are_uniform() -> None:
    values = torch.cat([draws(step=step).integers(Purpose.TIMESTEP, 1000) for step in range(40)])
    counts = torch.bincount(values // 100, minlength=10).double()
    expected = len(values) / 10
    assert values.min() >= 0 and values.max() < 1000 and len(counts) == 10
    assert ((counts - expected) ** 2 / expected).sum() < 27.9  # χ² with 9 degrees of freedom, p = 0.001


@pytest.mark.parametrize("probability", [0.0, 0.1, 1.0])
def test_bernoulli(probability: float) -> None:
    share = torch.cat(
        [draws(step=step).bernoulli(Purpose.CAPTION_DROPOUT, probability, 1)[:, 0] for step in range(20)]
    ).double()
    assert abs(share.mean() - probability) < 0.015 and (0 < probability < 1 or share.mean() == probability)


def test_every_part_of_the_key_changes_the_draws() -> None:
    """Changing a word of the seed or of the step, the slot or the purpose gives uncorrelated numbers."""
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


def test_a_slots_draws_do_not_depend_on_the_other_slots() -> None:
    whole = draws(slots=range(16)).normal(Purpose.NOISE, (3, 5))
    for start, stop in [(0, 4), (5, 6), (12, 16)]:
        torch.testing.assert_close(
            draws(slots=range(start, stop)).normal(Purpose.NOISE, (3, 5)), whole[start:stop], rtol=0, atol=0
        )


@pytest.mark.parametrize("canonical_nodes", [1, 2, 4, 6, 64])
def test_any_number_of_machines_partitions_the_slots_by_canonical_node(canonical_nodes: int) -> None:
    """1 to 12 machines of 1 to 3 ranks, and 15 and 16 machines of 8. Machines share only boundary nodes."""
    for nodes, ranks in [*product(range(1, 13), (1, 2, 3)), (16, 8), (15, 8)]:
        batch = math.lcm(nodes * ranks, canonical_nodes)
        local = batch // (nodes * ranks)
        slots = [
            global_slots(local, rank, nodes * ranks, ranks, canonical_nodes).tolist() for rank in range(nodes * ranks)
        ]
        assert sorted(slot for share in slots for slot in share) == list(range(batch))
        seen = [
            {slot % canonical_nodes for share in slots[node * ranks : (node + 1) * ranks] for slot in share}
            for node in range(nodes)
        ]
        if canonical_nodes % nodes == 0 or nodes % canonical_nodes == 0:
            assert max(map(len, seen)) == max(canonical_nodes // nodes, 1)
            assert all(slot % nodes == rank // ranks for rank, share in enumerate(slots) for slot in share)
        else:
            assert max(map(len, seen)) <= -(-canonical_nodes // nodes) + 1
            assert all(found == set(range(min(found), max(found) + 1)) for found in seen)
