"""Losses by the quarter of the time axis in which their samples were drawn: sums that add up over anything."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

NUM_QUARTERS = 4


@dataclass(frozen=True)
class LossSums:
    """No sample's place on the time axis depends on the others, so sums of microbatches, ranks and steps add up."""

    sums: Tensor
    """(…, 4) summed losses of each quarter."""
    counts: Tensor
    """(…, 4) how many samples were drawn there."""

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> "LossSums":
        """Of no samples."""
        return cls(*torch.zeros(2, NUM_QUARTERS, device=device, dtype=dtype))

    @classmethod
    def of(
        cls, losses: Tensor, timesteps: Tensor, num_train_timesteps: int, microbatch_size: int | None = None
    ) -> "LossSums":
        """Of samples with these losses (N,), drawn at these timesteps (N,).

        Args:
            microbatch_size: the sums of so many samples are added up, one after the other; None: all are one sum.
        """
        quarters = (timesteps * NUM_QUARTERS / num_train_timesteps).long().clamp(max=NUM_QUARTERS - 1)
        member = quarters[:, None] == torch.arange(NUM_QUARTERS, device=losses.device)  # (N, 4)
        # where, not a product: a loss that is not finite stays in its own quarter
        both = torch.stack([torch.where(member, losses[:, None], 0.0), member.float()])
        first, *rest = (part.sum(dim=1) for part in both.split(microbatch_size or len(losses), dim=1))
        return cls(*sum(rest, first))

    @classmethod
    def stack(cls, parts: Sequence["LossSums"]) -> "LossSums":
        """(len(parts), 4) of (4,) each."""
        return cls(torch.stack([part.sums for part in parts]), torch.stack([part.counts for part in parts]))

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(self.sums + other.sums, self.counts + other.counts)

    def reduce(self, accelerator: Accelerator) -> "LossSums":
        """Over all ranks, in float64 on the CPU; every rank must call this."""
        # float32 of three ranks and more would depend on their order, which the number of steps at once changes
        both = accelerator.reduce(torch.stack([self.sums, self.counts]).double(), "sum")
        return LossSums(*both.cpu())

    def steps(self) -> list["LossSums"]:
        """Each of the (steps, 4) that were stacked."""
        return [LossSums(*pair) for pair in zip(self.sums, self.counts, strict=True)]

    @property
    def total(self) -> float:
        """All losses."""
        return float(sum(self.sums.tolist()))

    def means(self, num_train_timesteps: int) -> dict[str, float | None]:
        """Timesteps of each quarter, as `first-last`, → mean loss of the samples drawn there; None where none was."""
        edges = [math.ceil(k * num_train_timesteps / NUM_QUARTERS) for k in range(NUM_QUARTERS + 1)]
        quarters = zip(edges, edges[1:], self.sums.tolist(), self.counts.tolist(), strict=False)
        return {f"{first}-{last - 1}": total / count if count else None for first, last, total, count in quarters}

    def to_json(self) -> list[float]:
        """Four sums, then four counts."""
        return [*self.sums.tolist(), *self.counts.tolist()]

    @classmethod
    def from_json(cls, values: Any) -> "LossSums":
        """What `to_json` gave."""
        return cls(*torch.tensor(values, dtype=torch.float64).reshape(2, NUM_QUARTERS))
