"""What the steps between two log lines took, of time and of the device's arithmetic."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shards.base.device import device_module, is_accelerator
from train.data.batch import Batch


@dataclass(frozen=True)
class Interval:
    """The steps since the line before."""

    steps: int
    seconds: float
    data_seconds: float
    """Of these, waiting for batches."""
    flops: int
    """That this rank's part of them needed; 0 where nobody asked."""

    def rate(self, global_batch_size: int) -> float:
        """Images per second, over all processes."""
        return self.steps * global_batch_size / self.seconds

    def mfu(self, peak_tflops: float | None) -> float | None:
        """Share of the device's peak (Chowdhery et al., 2022); None where that is not known."""
        return self.flops / self.seconds / (peak_tflops * 1e12) if peak_tflops else None


class Meter:
    """Counts steps, and hands over an interval when a line is due."""

    def __init__(self, flops_per_image: dict[tuple[int, int], int]):
        """`flops_per_image`: of each latent shape (h, w); empty where nobody will ask."""
        self.flops_per_image = flops_per_image
        self.restart()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Around what waits for a batch."""
        start = time.perf_counter()
        yield
        self.data_seconds += time.perf_counter() - start

    def count(self, batch: Batch) -> None:
        """One more step, on this rank's share of a global batch."""
        self.steps += 1
        height, width = batch.columns["image_latents"].shape[2:]
        self.flops += len(batch) * self.flops_per_image.get((height, width), 0)

    def close(self) -> Interval:
        """What was counted. The next interval begins with `restart`, as what is logged in between is in neither."""
        return Interval(self.steps, time.perf_counter() - self.start, self.data_seconds, self.flops)

    def restart(self) -> None:
        """Begin the next interval now."""
        self.steps, self.flops, self.data_seconds, self.start = 0, 0, 0.0, time.perf_counter()


def peak_memory(device: torch.device) -> int:
    """Most bytes that were allocated on a GPU at once; on a CPU, that this process held."""
    if is_accelerator(device):
        return int(device_module().max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
