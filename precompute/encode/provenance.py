"""Who makes a part, by which code, and how long each stage takes: for its receipt."""

import functools
import hashlib
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch

import precompute
import shards
from shards.base.errors import WorkError
from shards.format.receipts import MadeBy

Item = TypeVar("Item")
Result = TypeVar("Result")


@functools.cache
def source_sha256() -> str:
    """Over the Python files of this process's checkout that stage 1 may run."""
    digest = hashlib.sha256()
    for package in (precompute, shards):
        top = Path(next(iter(package.__path__)))
        for path in sorted(top.rglob("*.py")):
            digest.update(f"{top.name}/{path.relative_to(top).as_posix()}\n".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def check_source(drivers: str) -> None:
    """See that this process runs the driver's code.

    Raises:
        WorkError: it does not, and what it made could not be told from what the driver's code makes.
    """
    if source_sha256() != drivers:
        raise WorkError(
            f"The node {os.uname().nodename} runs another version of this program: its source has the SHA-256 "
            f"{source_sha256()}, the driver's {drivers}. Nothing was encoded there. Bring it to the driver's version, "
            f"or take it out of the cluster."
        )


def made_by(device: torch.device) -> MadeBy:
    """This process, on `device`."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return MadeBy(
        host=os.uname().nodename,
        gpu=gpu.name if gpu else f"CPU ({platform.machine()})",
        gpu_uuid=str(gpu.uuid) if gpu else None,
        version=version("latentmill"),
        source_sha256=source_sha256(),
    )


class Stopwatch:
    """Seconds by stage, added up over whatever threads work on it."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seconds: Counter[str] = Counter()
        self.lock = threading.Lock()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            with self.lock:
                self.seconds[stage] += time.monotonic() - began  # type: ignore[assignment]

    def timed(self, stage: str, function: Callable[..., Result]) -> Callable[..., Result]:
        """`function`, whose calls count."""

        def counted(*arguments: object, **options: object) -> Result:
            with self(stage):
                return function(*arguments, **options)

        return counted

    def waiting(self, stage: str, items: Iterable[Item]) -> Iterator[Item]:
        """`items`; the wait for each counts."""
        iterator = iter(items)
        while True:
            try:
                with self(stage):
                    item = next(iterator)
            except StopIteration:
                return
            yield item
