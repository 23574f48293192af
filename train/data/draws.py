"""Random numbers as a pure function of (seed, step, global slot): the same on any number of ranks, after any resume.

Philox-4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
A sample's stream is named by the counter, so no generator has a state that could be lost, skewed or shared, and a whole
batch is drawn at once on the device.
"""

import math
from collections.abc import Callable
from enum import IntEnum
from functools import cache, lru_cache

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
LOW_32 = 0xFFFFFFFF


class Purpose(IntEnum):
    """What a draw is for; each has a stream of its own."""

    POSTERIOR = 0
    NOISE = 1
    TIMESTEP = 2
    CAPTION_DROPOUT = 3
    OFFSET_NOISE = 4
    CAPTION_CHOICE = 5
    SIZE_DROPOUT = 8
    SIZE_JITTER = 9


NORMAL = (Purpose.POSTERIOR, Purpose.NOISE, Purpose.OFFSET_NOISE, Purpose.SIZE_JITTER)
"""Of which normals are asked for, and so made together."""


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four 32-bit words (in int64 tensors) for each counter of four 32-bit words; shapes broadcast.

    int64 products wrap modulo 2^64, which leaves their low 64 bits, all that is used, right.
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product0, product1 = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & LOW_32, (product1 >> 32) & LOW_32
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, product1 & LOW_32, high0 ^ x3 ^ k1, product0 & LOW_32
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW_32, (k1 + KEY_STEPS[1]) & LOW_32
    return x0, x1, x2, x3


@cache
def fused_philox() -> Callable[..., tuple[Tensor, ...]]:
    """The same in a kernel or two, which a compiler makes: whole numbers come out the same."""
    return torch.compile(philox, dynamic=False)


@lru_cache(maxsize=256)
def _counters(blocks: tuple[tuple[Purpose, int], ...], high: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(blocks,) first and last word of the counter, which are the same at each step."""
    numbers = torch.cat([torch.arange(number, device=device) for _, number in blocks])
    purposes = torch.cat([torch.full((number,), int(of) << 16 | high, device=device) for of, number in blocks])
    return numbers, purposes


class Draws:
    """The draws of some global slots of one step."""

    def __init__(self, seed: int, step: int, slots: Tensor, fused: bool = False):
        """Of `slots`, (N,) int64: each sample's place in the global batch; their device is where draws are made.

        Args:
            fused: by `fused_philox`.
        """
        self.fused = fused
        self.key = (seed & LOW_32, (seed >> 32) & LOW_32)
        self.step = step
        self.slots = slots
        self.drawn: dict[Purpose, Tensor] = {}
        """(N, words) of what was drawn so far."""
        self.normals: dict[Purpose, Tensor] = {}
        """(N, normals), an even number, of what was made of these so far."""

    def draw(self, counts: dict[Purpose, int]) -> None:
        """Draw what will be asked for, so many numbers of each, at once: a device takes as long to begin with few."""
        # four words a block: an odd number of normals, which take words in pairs, has its last pair whole
        blocks = {purpose: math.ceil(count / 4) for purpose, count in counts.items()}
        first, last = _counters(tuple(blocks.items()), self.step >> 32, self.slots.device)
        step = torch.full_like(first, self.step & LOW_32)
        made = (fused_philox() if self.fused else philox)((first, self.slots[:, None], step, last), self.key)
        words = torch.stack(torch.broadcast_tensors(*made), dim=-1)
        for purpose, part in zip(blocks, words.split(list(blocks.values()), dim=1), strict=True):
            self.drawn[purpose] = part.flatten(1)
        if normal := {purpose: count + count % 2 for purpose, count in counts.items() if purpose in NORMAL}:
            self._make_normals(normal)

    def words(self, purpose: Purpose, count: int) -> Tensor:
        """(N, count) integers in [0, 2^32), as int64."""
        if purpose not in self.drawn or self.drawn[purpose].shape[1] < count:
            self.draw({purpose: count})
        return self.drawn[purpose][:, :count]

    def normal(self, purpose: Purpose, shape: tuple[int, ...]) -> Tensor:
        """(N, *shape) float32 standard normals."""
        count = math.prod(shape)
        even = count + count % 2
        if purpose not in self.normals or self.normals[purpose].shape[1] != even:
            self._make_normals({purpose: even})
        return self.normals[purpose][:, :count].reshape(-1, *shape)

    def _make_normals(self, counts: dict[Purpose, int]) -> None:
        """By the Box-Muller transform: of each purpose's words the first half are radii, the others angles."""
        firsts, seconds = zip(*(self.words(*of).chunk(2, dim=1) for of in counts.items()), strict=True)
        uniform = (torch.cat(firsts + seconds, dim=1).float() + 0.5) * 2.0**-32  # (0, 1]
        u1, u2 = uniform.chunk(2, dim=1)
        radius, angle = (-2.0 * u1.log()).sqrt(), 2.0 * math.pi * u2
        sizes = [count // 2 for count in counts.values()]
        pairs = zip((radius * angle.cos()).split(sizes, dim=1), (radius * angle.sin()).split(sizes, dim=1), strict=True)
        self.normals |= {purpose: torch.cat(pair, dim=1) for purpose, pair in zip(counts, pairs, strict=True)}

    def uniform(self, purpose: Purpose) -> Tensor:
        """(N,) float32 in (0, 1]."""
        return (self.words(purpose, 1)[:, 0].float() + 0.5) * 2.0**-32

    def integers(self, purpose: Purpose, high: int | Tensor) -> Tensor:
        """(N,) integers in [0, high), uniform but for a bias below high / 2^32; `high`: one for all, or (N,)."""
        return (self.words(purpose, 1)[:, 0] * high) >> 32

    def chances(self, purpose: Purpose, probability: float, count: int) -> Tensor:
        """(N, count) booleans, each true with `probability`; the first of a sample is the same for any `count`."""
        return self.words(purpose, count) < round(probability * 2**32)


def global_slots(
    local_batch_size: int, rank: int, world_size: int, local_world_size: int, num_canonical_nodes: int = 1
) -> Tensor:
    """(local_batch_size,) places in the global batch of the samples that `rank` gets, in its loader's order.

    Together the ranks have every place once. Where one number of nodes, of machines or canonical ones, divides the
    other, the places of a machine are node, node + num_nodes, …: of `train/data/order.py`'s canonical nodes it sees
    its own share alone. Otherwise the places are put in the order of their canonical nodes, and machines take equal
    runs of that: ⌈canonical nodes / machines⌉ + 1 of them at most, of which its first and last are others' too.
    """
    num_nodes = world_size // local_world_size
    node, local_rank = divmod(rank, local_world_size)
    if num_canonical_nodes % num_nodes == 0 or num_nodes % num_canonical_nodes == 0:
        return torch.arange(local_batch_size) * world_size + local_rank * num_nodes + node
    each = local_batch_size * world_size // num_canonical_nodes
    ordered = (node * local_batch_size + torch.arange(local_batch_size)) * local_world_size + local_rank
    return ordered % each * num_canonical_nodes + ordered // each
