"""Provenance of a part: a check that workers run the driver's code, and the device time per tower."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shards.base.device import device_module, is_accelerator
from shards.base.errors import UnfitNode
from shards.root.provenance import Stopwatch, source_sha256


def check_source(expected: str) -> None:
    """Check that the SHA-256 of this process's source code matches the driver's.

    Raises:
        UnfitNode: The code differs. Parts encoded by different code would be indistinguishable.
    """
    if source_sha256() != expected:
        raise UnfitNode(
            f"The node {os.uname().nodename} runs a different version of latentmill than the driver: the SHA-256 of "
            f"its source is {source_sha256()}, and the driver's is {expected}. Nothing was encoded on this node. "
            f"Install the driver's version on the node, or remove the node from the cluster."
        )


class DeviceClock:
    """Device time per tower, in seconds: measured by events on a GPU, and by the duration of calls on a CPU."""

    def __init__(self, device: torch.device, stopwatch: Stopwatch):
        self.is_accelerator, self.stopwatch = is_accelerator(device), stopwatch
        self.begun: list[tuple[str, Any, Any]] = []

    @contextmanager
    def __call__(self, tower: str) -> Iterator[None]:
        """Count work started in the block towards `tower`: `image`, `texts.NAME` or `features.NAME`."""
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
        """Add up the time of all batches, which must have finished. `device` is the sum over the towers."""
        seconds = self.stopwatch.seconds
        for stage, begin, end in self.begun:
            end.synchronize()
            seconds[stage] += begin.elapsed_time(end) / 1000
        self.begun.clear()
        seconds["device"] = sum(spent for stage, spent in seconds.items() if stage.startswith("device."))
