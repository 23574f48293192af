"""Provenance for receipts: host and GPU, source code hash, package versions, and time per stage."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shards.base.device import device_module, is_accelerator
from shards.format.receipts import MadeBy

if TYPE_CHECKING:
    import torch

Item = TypeVar("Item")
PACKAGES = ("cluster", "precompute", "shards")
"""Packages whose code determines the bytes of a part."""


@functools.cache
def source_sha256() -> str:
    """Hash the Python files of PACKAGES, as this process would import them."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None and spec.submodule_search_locations is not None
        top = Path(next(iter(spec.submodule_search_locations)))
        for path in sorted(top.rglob("*.py")):
            digest.update(f"{top.name}/{path.relative_to(top).as_posix()}\n".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@functools.cache
def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return a dict from package to version. The result is cached, because looking up six versions takes as long as
    processing a dozen small images."""
    return {name: version(name) for name in packages}


@functools.cache
def made_by(device: torch.device) -> MadeBy:
    """Describe this process's machine, `device` and code, for a receipt."""
    gpu = device_module().get_device_properties(device) if is_accelerator(device) else None
    return MadeBy(
        host=os.uname().nodename,
        gpu=gpu.name if gpu else f"CPU ({platform.machine()})",
        gpu_uuid=str(gpu.uuid) if gpu else None,
        version=version("latentmill"),
        source_sha256=source_sha256(),
    )


class Stopwatch:
    """Stopwatch that records seconds per stage, summed over all threads."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.lock = threading.Lock()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            with self.lock:
                self.seconds[stage] += time.monotonic() - began

    def waiting(self, stage: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield `items`, and add the time spent waiting for each of them to `stage`."""
        iterator = iter(items)
        while True:
            try:
                with self(stage):
                    item = next(iterator)
            except StopIteration:
                return
            yield item
