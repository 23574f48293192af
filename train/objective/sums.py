"""Loss sums for each quarter of the time axis, which can be added over microbatches, ranks and steps."""

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
    """Summed losses and sample counts for each quarter of the time axis."""

    sums: Tensor
    """(…, 4) sum of the losses in each quarter."""
    counts: Tensor
    """(…, 4) number of samples in each quarter."""

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> "LossSums":
        """Return the sums over zero samples."""
        return cls(*torch.zeros(2, NUM_QUARTERS, device=device, dtype=dtype))

    @classmethod
    def of(
        cls, losses: Tensor, timesteps: Tensor, num_train_timesteps: int, microbatch_size: int | None = None
    ) -> "LossSums":
        """Sum the losses (N,) of samples at timesteps (N,) by quarter.

        Args:
            microbatch_size: sum each microbatch first and then add these sums in order, so that rounding does not
                depend on how the batch was split; None: sum all samples at once.
        """
        quarters = (timesteps * NUM_QUARTERS / num_train_timesteps).long().clamp(max=NUM_QUARTERS - 1)
        member = quarters[:, None] == torch.arange(NUM_QUARTERS, device=losses.device)  # (N, 4)
        # torch.where instead of a product, so that a non-finite loss stays in its own quarter
        both = torch.stack([torch.where(member, losses[:, None], 0.0), member.float()])
        first, *rest = (part.sum(dim=1) for part in both.split(microbatch_size or len(losses), dim=1))
        return cls(*sum(rest, first))

    @classmethod
    def stack(cls, parts: Sequence["LossSums"]) -> "LossSums":
        """Stack sums of shape (4,) into sums of shape (len(parts), 4)."""
        return cls(torch.stack([part.sums for part in parts]), torch.stack([part.counts for part in parts]))

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(self.sums + other.sums, self.counts + other.counts)

    def reduce(self, accelerator: Accelerator) -> "LossSums":
        """Add up all ranks' sums, in float64 on the CPU. Every rank must call this."""
        # with three or more ranks, float32 sums would depend on the order in which ranks are added, which in turn
        # depends on how many steps are reduced at once
        both = accelerator.reduce(torch.stack([self.sums, self.counts]).double(), "sum")
        return LossSums(*both.cpu())

    def steps(self) -> list["LossSums"]:
        """Split stacked sums (steps, 4) into the sums of each step."""
        return [LossSums(*pair) for pair in zip(self.sums, self.counts, strict=True)]

    @property
    def total(self) -> float:
        """Sum of all losses."""
        return float(sum(self.sums.tolist()))

    def means(self, num_train_timesteps: int) -> dict[str, float | None]:
        """Return the mean loss of each quarter, or None if it has no samples, by its timesteps as `first-last`."""
        edges = [math.ceil(k * num_train_timesteps / NUM_QUARTERS) for k in range(NUM_QUARTERS + 1)]
        quarters = zip(edges, edges[1:], self.sums.tolist(), self.counts.tolist(), strict=False)
        return {f"{first}-{last - 1}": total / count if count else None for first, last, total, count in quarters}

    def to_json(self) -> list[float]:
        """Return the four sums, then the four counts."""
        return [*self.sums.tolist(), *self.counts.tolist()]

    @classmethod
    def from_json(cls, values: Any) -> "LossSums":
        """Restore sums from the output of `to_json`."""
        return cls(*torch.tensor(values, dtype=torch.float64).reshape(2, NUM_QUARTERS))
