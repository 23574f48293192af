"""That a worker runs its driver's code, and how long its device is at work: for a part's receipt."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shards.base.device import device_module, is_accelerator
from shards.base.errors import UnfitNode
from shards.root.provenance import Stopwatch, source_sha256


def check_source(drivers: str) -> None:
    """See that this process runs the driver's code.

    Raises:
        UnfitNode: it does not, and what it made could not be told from what the driver's code makes.
    """
    if source_sha256() != drivers:
        raise UnfitNode(
            f"The node {os.uname().nodename} runs another version of this program: its source has the SHA-256 "
            f"{source_sha256()}, the driver's {drivers}. Nothing was encoded there. Bring it to the driver's version, "
            f"or take it out of the cluster."
        )


class DeviceClock:
    """Seconds in which a device is at work for each tower: of a GPU by its own events, else of the calls that work."""

    def __init__(self, device: torch.device, stopwatch: Stopwatch):
        self.is_accelerator, self.stopwatch = is_accelerator(device), stopwatch
        self.begun: list[tuple[str, Any, Any]] = []

    @contextmanager
    def __call__(self, tower: str) -> Iterator[None]:
        """What is handed to the device inside counts as that of `tower`: `image`, `texts.NAME` or `features.NAME`."""
        stage = f"device.{tower}"
        if not self.is_accelerator:
            with self.stopwatch(stage):
                yield
            return
        begin, end = (device_module().Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self.begun.append((stage, begin, end))

    def stop(self) -> None:
        """Add up what all batches took, which were waited for; `device` is the sum over the towers."""
        seconds = self.stopwatch.seconds
        for stage, begin, end in self.begun:
            end.synchronize()
            seconds[stage] += begin.elapsed_time(end) / 1000
        self.begun.clear()
        seconds["device"] = sum(spent for stage, spent in seconds.items() if stage.startswith("device."))
