"""Random numbers as a pure function of (seed, step, global slot).

They are the same for any number of ranks, and after a resume.

The generator is Philox-4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1,
2, 3" (SC 2011). The counter encodes the step, the sample and the purpose of a draw, so there is no generator state that
could be lost, diverge or be shared by mistake, and a whole batch is drawn at once on the device.
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
    """Purpose of a draw. Each purpose has an independent random stream keyed by its value, so never reuse a value."""

    POSTERIOR = 0
    NOISE = 1
    TIMESTEP = 2
    CAPTION_DROPOUT = 3
    OFFSET_NOISE = 4
    CAPTION_CHOICE = 5
    SIZE_DROPOUT = 8
    SIZE_JITTER = 9


NORMAL = (Purpose.POSTERIOR, Purpose.NOISE, Purpose.OFFSET_NOISE, Purpose.SIZE_JITTER)
"""Purposes that need normal rather than uniform numbers; `Draws.draw` computes them together."""


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return four 32-bit words (in int64 tensors) for each counter of four 32-bit words. Shapes broadcast.

    int64 products wrap modulo 2^64. Their low 64 bits are therefore exact, and no other bits are used.
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
    """Compile `philox` into one or two kernels. The results are identical, because the arithmetic is on integers."""
    return torch.compile(philox, dynamic=False)


@lru_cache(maxsize=256)
def _counters(blocks: tuple[tuple[Purpose, int], ...], high: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first word and the last word of the counters, (blocks,) each. They do not change between steps."""
    numbers = torch.cat([torch.arange(number, device=device) for _, number in blocks])
    purposes = torch.cat([torch.full((number,), int(of) << 16 | high, device=device) for of, number in blocks])
    return numbers, purposes


class Draws:
    """Random numbers for one step, for some of the slots of its global batch."""

    def __init__(self, seed: int, step: int, slots: Tensor, fused: bool = False):
        """
        Args:
            slots: (N,) int64 position of each sample in the global batch. Numbers are drawn on its device.
            fused: use `fused_philox`.
        """
        self.fused = fused
        self.key = (seed & LOW_32, (seed >> 32) & LOW_32)
        self.step = step
        self.slots = slots
        self.drawn: dict[Purpose, Tensor] = {}
        """Words drawn so far, (N, words) for each purpose."""
        self.normals: dict[Purpose, Tensor] = {}
        """Normals computed from those words, (N, normals) for each purpose; the number of normals is always even."""

    def draw(self, counts: dict[Purpose, int]) -> None:
        """Draw `counts` numbers per slot for each purpose in one call, because kernel launches dominate the cost."""
        # normals use words in pairs, and a block has four words, so even an odd number of normals gets enough of them
        blocks = {purpose: math.ceil(count / 4) for purpose, count in counts.items()}
        first, last = _counters(tuple(blocks.items()), self.step >> 32, self.slots.device)
        step = torch.full_like(first, self.step & LOW_32)
        outputs = (fused_philox() if self.fused else philox)((first, self.slots[:, None], step, last), self.key)
        words = torch.stack(torch.broadcast_tensors(*outputs), dim=-1)
        for purpose, part in zip(blocks, words.split(list(blocks.values()), dim=1), strict=True):
            self.drawn[purpose] = part.flatten(1)
        if normal := {purpose: count + count % 2 for purpose, count in counts.items() if purpose in NORMAL}:
            self._make_normals(normal)

    def words(self, purpose: Purpose, count: int) -> Tensor:
        """Return (N, count) integers in [0, 2^32), as int64."""
        if purpose not in self.drawn or self.drawn[purpose].shape[1] < count:
            self.draw({purpose: count})
        return self.drawn[purpose][:, :count]

    def normal(self, purpose: Purpose, shape: tuple[int, ...]) -> Tensor:
        """Return (N, *shape) float32 standard normals."""
        count = math.prod(shape)
        even = count + count % 2
        if purpose not in self.normals or self.normals[purpose].shape[1] != even:
            self._make_normals({purpose: even})
        return self.normals[purpose][:, :count].reshape(-1, *shape)

    def _make_normals(self, counts: dict[Purpose, int]) -> None:
        """Apply the Box-Muller transform to each purpose's words.

        The first half of the words gives the radii, and the second half gives the angles.
        """
        firsts, seconds = zip(*(self.words(*of).chunk(2, dim=1) for of in counts.items()), strict=True)
        uniform = (torch.cat(firsts + seconds, dim=1).float() + 0.5) * 2.0**-32  # (0, 1]
        u1, u2 = uniform.chunk(2, dim=1)
        radius, angle = (-2.0 * u1.log()).sqrt(), 2.0 * math.pi * u2
        sizes = [count // 2 for count in counts.values()]
        pairs = zip((radius * angle.cos()).split(sizes, dim=1), (radius * angle.sin()).split(sizes, dim=1), strict=True)
        self.normals |= {purpose: torch.cat(pair, dim=1) for purpose, pair in zip(counts, pairs, strict=True)}

    def uniform(self, purpose: Purpose) -> Tensor:
        """Return (N,) float32 uniform numbers in (0, 1]."""
        return (self.words(purpose, 1)[:, 0].float() + 0.5) * 2.0**-32

    def integers(self, purpose: Purpose, high: int | Tensor) -> Tensor:
        """Return (N,) integers in [0, high), uniform up to a bias below high / 2^32.

        Args:
            high: an integer, or one integer per sample, (N,).
        """
        return (self.words(purpose, 1)[:, 0] * high) >> 32

    def bernoulli(self, purpose: Purpose, probability: float, count: int) -> Tensor:
        """Return booleans of shape (N, count), each True with probability `probability`.

        A sample's first value does not depend on `count`.
        """
        return self.words(purpose, count) < round(probability * 2**32)


def global_slots(
    local_batch_size: int, rank: int, world_size: int, local_world_size: int, num_canonical_nodes: int = 1
) -> Tensor:
    """Return the slots of the global batch that `rank` loads, (local_batch_size,), in the order of its loader.

    The ranks partition the global batch. If the number of machines divides the number of canonical nodes (see
    `train/data/order.py`), or vice versa, a machine gets the slots node, node + num_nodes, …, so that it reads only its
    own canonical nodes. Otherwise the slots are sorted by canonical node and split evenly among the machines. A machine
    then reads at most ⌈canonical nodes / machines⌉ + 1 canonical nodes, and may share the first and the last of these
    with other machines.
    """
    num_nodes = world_size // local_world_size
    node, local_rank = divmod(rank, local_world_size)
    if num_canonical_nodes % num_nodes == 0 or num_nodes % num_canonical_nodes == 0:
        return torch.arange(local_batch_size) * world_size + local_rank * num_nodes + node
    each = local_batch_size * world_size // num_canonical_nodes
    ordered = (node * local_batch_size + torch.arange(local_batch_size)) * local_world_size + local_rank
    return ordered % each * num_canonical_nodes + ordered // each
