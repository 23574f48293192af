"""Measurements for the steps between two log lines: wall time, time spent waiting for data, FLOPs and peak memory."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shards.base.device import device_module, is_accelerator
from train.data.batch import Batch


class Meter:
    """Meter for the steps in an interval, which begins with `restart`."""

    def __init__(self, flops_per_image: dict[tuple[int, int], int]):
        """`flops_per_image`: latent shape (h, w) → training FLOPs per image; empty: FLOPs are not counted."""
        self.flops_per_image = flops_per_image
        self.restart()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time spent in this context as time spent waiting for data."""
        start = time.perf_counter()
        yield
        self.data_seconds += time.perf_counter() - start

    def count(self, batch: Batch) -> None:
        """Count one more step. `batch`: this rank's share of the global batch."""
        self.steps += 1
        height, width = batch.columns["image_latents"].shape[2:]
        self.flops += len(batch) * self.flops_per_image.get((height, width), 0)

    def restart(self) -> None:
        """Begin the next interval."""
        self.steps, self.start = 0, time.perf_counter()
        self.flops = 0
        """Model FLOPs for this rank's samples; 0 if FLOPs are not counted."""
        self.data_seconds = 0.0
        """Seconds of the interval spent waiting for batches."""


def peak_memory(device: torch.device) -> int:
    """Return the peak number of bytes allocated on the device, or this process's peak RSS if the device is the CPU."""
    if is_accelerator(device):
        return int(device_module().max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
