"""Who makes a part, by which code: for its receipt."""

import functools
import hashlib
import os
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from shards.format.receipts import MadeBy

PACKAGES = ("precompute", "shards")
"""Those whose code decides over the bytes of a part."""


@functools.cache
def source_sha256() -> str:
    """Over the Python files of PACKAGES, as this process would import them."""
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
    """Package → its version. (To look six up takes as long as a dozen small pictures.)"""
    return {name: version(name) for name in packages}


@functools.cache
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
