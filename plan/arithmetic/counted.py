"""On-disk cache of FLOP counts.

Counting imports torch and diffusers and takes several seconds, but most plans change only prices or GPUs. The user's
cache folder has one file per set of networks. The file's name is a hash of everything that the count depends on: the
network configs, the training config's `backbone` section, the buckets, the counting code, and the versions of the
libraries that build the networks.
"""

import hashlib
import os
from collections.abc import Collection
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from plan.arithmetic.work import Work, count_work, read_configs
from plan.config import Networks
from shards.base.durable import canonical_json, write_atomically

ROOT = Path(__file__).parents[2]
CODE = ("plan", "train/model", "shards/format")
"""Folders whose code affects the counts."""
LIBRARIES = ("torch", "diffusers", "transformers")
FOLDER = Path("latentmill") / "plan"
WORK = TypeAdapter(Work)


def cached_work(networks: Networks, buckets: Collection[str]) -> Work:
    """Return the work of `networks` from the cache. If it is not there, count it and cache the result.

    Raises:
        RequestError: the networks cannot be built; see `count_work`.
    """
    name = f"{cache_key(networks, buckets)}.json"
    with suppress(OSError, RuntimeError, ValidationError):  # missing or truncated: count again
        return WORK.validate_json((cache_folder() / name).read_bytes())
    work = count_work(networks, buckets)
    with suppress(OSError, RuntimeError):  # without a writable home folder, the next plan counts again
        write_atomically(cache_folder() / name, WORK.dump_json(work))
    return work


def cache_folder() -> Path:
    """Return the folder of cached counts.

    Raises:
        RuntimeError: the user has no home folder, as in some containers.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / FOLDER


def cache_key(networks: Networks, buckets: Collection[str]) -> str:
    """Hash everything that the count depends on."""
    code = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", ".yaml")]
    parts = {
        "networks": networks.model_dump(mode="json"),
        "configs": read_configs(networks),
        "buckets": list(buckets),
        "code": [hashlib.sha256(path.read_bytes()).hexdigest() for path in code],
        "libraries": [metadata.version(name) for name in LIBRARIES],
    }
    return hashlib.sha256(canonical_json(parts)).hexdigest()
