"""Counted work is kept: counting takes torch, diffusers and several seconds, and most plans change only prices or GPUs.

The user's cache folder holds a file for each set of networks. Its name is a hash of everything that the count depends
on: the networks' configs, the buckets, the code that counts, and the versions of the libraries that build the networks.
"""

import hashlib
import os
import tempfile
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
"""Folders whose files decide what is counted."""
LIBRARIES = ("torch", "diffusers", "transformers")
FOLDER = Path("latentmill") / "plan"
WORK = TypeAdapter(Work)


def counted_work(networks: Networks, buckets: Collection[str]) -> Work:
    """`count_work`, or what it gave before for the same networks and buckets.

    Raises:
        RequestError: as `count_work`.
    """
    path = cache_folder() / f"{key(networks, buckets)}.json"
    with suppress(OSError, ValidationError):  # not there, or cut short: it is counted again
        return WORK.validate_json(path.read_bytes())
    work = count_work(networks, buckets)
    with suppress(OSError):  # a home that cannot be written: the next plan counts again
        write_atomically(path, WORK.dump_json(work))
    return work


def cache_folder() -> Path:
    """Return the folder of cached counts."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / FOLDER
    try:
        return Path.home() / ".cache" / FOLDER
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / f"latentmill-cache-{os.getuid()}" / FOLDER


def key(networks: Networks, buckets: Collection[str]) -> str:
    """A hash of everything that the count depends on."""
    configs = read_configs(networks)
    code = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", ".yaml")]
    parts = {
        "networks": networks.model_dump(mode="json"),
        "configs": configs,
        "backbone": Path(networks.backbone).read_text(),
        "buckets": list(buckets),
        "code": [hashlib.sha256(path.read_bytes()).hexdigest() for path in code],
        "libraries": [metadata.version(name) for name in LIBRARIES],
    }
    return hashlib.sha256(canonical_json(parts)).hexdigest()
